# SPDX-License-Identifier: Apache-2.0
"""The door's managers with real agents and pools, and without SGLang's scheduler around them."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang_door.test_sglang_cache import (
    HEADS,
    NAMED,
    SLIDING_WINDOW,
    SLOTS,
    TOKENS,
    full_attention,
    slots_of,
)
from support.agents import until

from pd_connector.agent.agent import Agent
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.wire.final_token import FIRST_TOKEN, draft_form
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.sglang.adapters import Adapters
from pd_connector.sglang.admission import Admission
from pd_connector.sglang.cache import DraftPool, describe_cache, own_shard
from pd_connector.sglang.manager import Manager
from pd_connector.sglang.prefill_engines import LookupResult
from pd_connector.sglang.rank import PoolPages, Rank
from pd_connector.sglang.receiver import Receiver
from pd_connector.sglang.recompute import SecondPrefill
from pd_connector.sglang.sender import Sender

ROOM = 77
CONFIG = Config(transports=("tcp",), connect_timeout_s=5.0, lease_s=30.0)


class Engine(Manager):
    """A manager without SGLang's scheduler around it."""

    def __init__(
        self,
        *,
        produces: bool,
        page_size: int = 16,
        pool: Any = None,
        rank: tuple[int, int] = (0, 1),
        draft: Any = None,
        drafted: int = 0,
        draft_vocabulary: int = sys.maxsize,
    ) -> None:
        self._config = CONFIG
        pool, parts = pool if isinstance(pool, tuple) else (pool, ())
        self.pool = pool or full_attention(page_size, HEADS // rank[1])
        states = getattr(self.pool, "mamba_pool", None)
        self.shard = own_shard(self.pool, *rank)
        cache = describe_cache(
            self.pool,
            NAMED,
            self.shard,
            sliding_window=SLIDING_WINDOW,
            parts=parts,
            draft=None if draft is None else DraftPool(draft, NAMED),
        )
        self.draft = draft
        buffers = MetadataBuffers(4, 16, torch.float32, 0)
        form = draft_form(drafted, 16, "float32")
        words = (FIRST_TOKEN, *([form] if drafted else ()))
        self.agent = Agent(
            CONFIG,
            "p" if produces else "d",
            ModelFacts(b"config", b"weights", draft=b"draft" if draft is not None else b""),
            cache,
            produces=produces,
            consumes=not produces,
            tells=words if produces else (),
            needs=() if produces else words,
            shards=[own_shard(self.pool, place, rank[1]) for place in range(rank[1])],
        )
        scheduler = SimpleNamespace(
            device="cpu",
            token_to_kv_pool_allocator=SimpleNamespace(
                translate_swa_indices_for_transfer=self._windowed
            ),
        )
        self.rank = Rank(
            self.agent,
            Admission(produces=produces, vocabulary=259, most_logprobs=128, in_step=True),
            buffers,
            PoolPages(
                scheduler,
                page_size,
                limit=max(SLOTS, self.pool.size) // page_size + 1,
                windows=hasattr(self.pool, "swa_kv_pool"),
                slots=states.size + 1 if states is not None else 0,
            ),
            Adapters(SimpleNamespace(lora_manager=None)),
            produces=produces,
            offers_early=True,
            leads=True,
            vocabulary=sys.maxsize,
            drafted=drafted,
            draft_vocabulary=draft_vocabulary,
        )
        self.found = LookupResult(())
        self.forgotten: list[str] = []

    def _windowed(self, slots: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.pool.translate_loc_from_full_to_swa(slots)
        return found

    def prefill_engine(self, address: str) -> LookupResult:
        return self.found

    def forget_prefill_engine(self, address: str) -> None:
        self.forgotten.append(address)

    def compute_again(
        self, req: Any, address: str, cause: Cause, rest: dict[str, Any] | None = None
    ) -> SecondPrefill | None:
        return None  # see test_sglang_recompute.py


def make_request(tokens: range = range(TOKENS)) -> Any:
    """As much of SGLang's `Req` as the door reads."""
    return SimpleNamespace(
        rid="r",
        origin_input_ids=list(tokens),
        cache_salt=None,
        lora_id=None,
        return_logprob=False,
        metadata_buffer_index=1,
        output_ids=[9],
        cached_tokens=0,
        cached_tokens_device=0,
        cached_tokens_host=0,
        cached_tokens_storage=0,
        get_mm_token_counts=lambda: (0, 0, 0),
        return_sampling_mask=False,
        hidden_states_tensor=None,
        bootstrap_room=ROOM,
    )


class Pair:
    def __init__(
        self,
        page_sizes: tuple[int, int] = (16, 16),
        pools: tuple[Any, Any] = (None, None),
        drafts: tuple[Any, Any] = (None, None),
        drafted: tuple[int, int] = (0, 0),
    ) -> None:
        engines = [
            Engine(produces=produces, page_size=size, pool=pool, draft=draft, drafted=tokens)
            for produces, size, pool, draft, tokens in zip(
                (True, False), page_sizes, pools, drafts, drafted, strict=True
            )
        ]
        self.p, self.d = engines
        peer = Peer(Source("127.0.0.1", self.p.agent.port, "p"), own_shard(self.p.pool, 0, 1))
        self.d.found = LookupResult(((peer,),))

    def request(self, tokens: range = range(TOKENS)) -> Any:
        return make_request(tokens)

    def sender(self, req: Any) -> Sender:
        sender = Sender(self.p, "", ROOM)
        sender.bind(req)
        sender.init(3, 1)
        return sender

    def receiver(self, req: Any) -> Receiver:
        receiver = Receiver(self.d, "127.0.0.1:8998", ROOM)
        receiver.bind(req)
        receiver.init(0)
        return receiver

    def pages(self, engine: Engine, first: int = 1) -> np.ndarray[Any, Any]:
        count = -(-TOKENS // engine.rank.pages.size)
        return np.arange(first, first + count, dtype=np.int32)

    def assert_same_slots(self, buffer: str) -> None:
        """The prompt's tokens are the same on both sides, in every layer's `k_buffer` or `v_buffer`."""
        here, there = (
            slots_of(self.pages(one).tolist(), one.rank.pages.size) for one in (self.p, self.d)
        )
        sides = (getattr(one.pool, buffer) for one in (self.p, self.d))
        for ours, theirs in zip(*sides, strict=True):
            assert torch.equal(ours[here], theirs[there])

    def send_all(self, sender: Sender, req: Any) -> None:
        """The prompt in two chunks, as SGLang sends them."""
        pages, size = self.pages(self.p), self.p.rank.pages.size
        first = 16 // size
        sender.send(pages[:first], None, num_kv_tokens=16)
        self.p.rank.buffers.set_buf(req)
        sender.send(pages[first:], [], num_kv_tokens=TOKENS - 16)

    def close(self) -> None:
        self.p.agent.close()
        self.d.agent.close()

    def idle(self) -> bool:
        names = ("leased_pages", "outgoing_transfers", "incoming_transfers", "landing_slots")
        gauges = [engine.agent.telemetry.gauges() for engine in (self.p, self.d)]
        held = any(g.get(name) for g in gauges for name in (*names, "send_slots"))
        return not held and not (self.p.rank.outcomes.watched or self.d.rank.outcomes.watched)


def reach(poll: Callable[[], int], state: int) -> None:
    until(lambda: poll() == state, f"state {state}")
