# SPDX-License-Identifier: Apache-2.0
"""An engine of vLLM's scheduler, the connector's two sides and a real agent, over a worker whose KV can be checked: of
each token it is a number made of all tokens up to it. Steps have vLLM's own order of calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from pd_connector.agent.advertised_model import AdvertisedModel
from pd_connector.agent.agent import Agent
from pd_connector.config import Config
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.pool.host import open_pool
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.vllm.identity.layers import CacheId
from pd_connector.vllm.messages import StepCommands
from pd_connector.vllm.runner import hooks_tell_layers
from pd_connector.vllm.worker_side import WorkerSide
from support.vllm_steps import SteppedEngine

DIM = 2
LAYERS = 2  # of each page table
_SMALL = {"slot_mib": 1, "slots": 4, "heartbeat_s": 0.1, "lease_share": 1.0, "audit": "off"}


def full(page_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=page_size, num_kv_heads=1, head_size=DIM, dtype=torch.float32
    )


def window(tokens: int, page_size: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=page_size,
        num_kv_heads=1,
        head_size=DIM,
        dtype=torch.float32,
        sliding_window=tokens,
    )


def marks(tokens: Sequence[int]) -> np.ndarray:
    """For each of these tokens a number of 64 bits that is made of all tokens up to it."""
    mark, found = 0, []
    for token in tokens:
        mark = ((mark ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % (1 << 64)
        mark ^= mark >> 29
        found.append(mark)
    return np.array(found, dtype=np.uint64)


def kv_of(layer: int, marks: np.ndarray) -> torch.Tensor:
    """What a layer keeps of these tokens, `[token, K and V]`: whole numbers, exact in float32."""
    mixed = marks * np.uint64(2 * layer + 1)
    parts = [(mixed >> np.uint64(16 * part)) & np.uint64(0xFFFF) for part in range(2 * DIM)]
    return torch.from_numpy(np.stack(parts, axis=1).astype(np.float32))


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after these tokens."""
    return int(marks(tokens)[-1] >> np.uint64(8)) % 250


@dataclass
class _Row:
    """What a model runner keeps of a request."""

    tokens: list[int]
    prompt: int
    pages: list[list[int]] = field(default_factory=list)


class _Weights(AdvertisedModel):
    """A watch (`ModelWatch`) of weights that stay as they are."""

    def step(self, **_: bool) -> None: ...


class ComputingEngine(SteppedEngine):
    """An engine of one rank that computes.

    Args:
        specs: of the groups of its cache, each with `LAYERS` layers.
        pause_s: time between the begin of a step and each of its layers, in which the agent's thread may do what it
            likes.
        late: as vLLM's second model runner: pages are zeroed before `handle_preemptions` is called.
        drafts: as vLLM with a draft model (V1, and V2 from 0.33 on): a step's results are taken before `wait_for_save`.
        zeroes: new pages are zeroed when they are allocated.
        layout: name of the order within pages; unlike ones pass token by token.
        parts: in which a batch is computed, layer by layer (`--enable-dbo`).
    """

    def __init__(
        self,
        name: str,
        role: str = "kv_both",
        *,
        specs: Sequence[Any] = (),
        blocks: int = 200,
        pause_s: float = 0.0,
        late: bool = False,
        drafts: bool = False,
        zeroes: bool = False,
        parts: int = 1,
        layout: str = "test",
        **extra: Any,
    ) -> None:
        specs = list(specs) or [full()]
        settings = {key: value for key, value in extra.items() if key in Config.__struct_fields__}
        others = {key: value for key, value in extra.items() if key not in settings}
        settings = {**_SMALL, **settings}
        super().__init__(role, specs=specs, blocks=blocks, **others, **settings)
        self.name, self._specs, self.pause_s = name, specs, pause_s
        self._late, self._drafts, self._ahead = late, drafts, bool(extra.get("ahead"))
        self._untold: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.scheduler.needs_kv_cache_zeroing = zeroes
        self.wrong: list[str] = []
        self.answers: dict[str, dict[str, Any] | None] = {}
        self.ended: dict[str, Any] = {}
        self._rows: dict[str, _Row] = {}
        self._layers: dict[int, tuple[int, torch.Tensor]] = {}  # by number: its table, its pages
        groups = []
        for table, spec in enumerate(specs):
            numbers = tuple(range(table, LAYERS * len(specs), len(specs)))
            for number in numbers:
                pages = torch.full((blocks, 1, spec.block_size, 2 * DIM), -1.0)
                self._layers[number] = table, pages
            kept = getattr(spec, "sliding_window", 0) or 0
            groups.append(
                Group(
                    "attention", numbers, 1, DIM, DIM, spec.block_size, kept, "float32", layout, True, table
                )
            )  # fmt: skip
        geometry = Geometry(Shard(0, LAYERS * len(specs), 0, 1), tuple(groups))
        views = {
            number: LayerPages(
                pages[..., :DIM], pages[..., DIM:], (pages.view(torch.uint8).flatten(2),)
            )
            for number, (_, pages) in self._layers.items()
        }
        engine_id = self.side.offers.address.engine_id
        self.agent = Agent(
            Config(**settings),
            engine_id,
            ModelFacts(b"config", b"all bytes"),
            PagedCache(views, geometry),
            produces=role != "kv_consumer",
            consumes=role != "kv_producer",
            late_revokes=late,
            audits=settings["audit"] != "off",
            store=pool[0] if (pool := open_pool(settings.get("pool", False))) else None,
        )
        self._parts = parts
        parallel = SimpleNamespace(
            rank=0, world_size=1, data_parallel_size=1, use_ubatching=parts > 1
        )
        config: Any = SimpleNamespace(parallel_config=parallel)
        cache = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        )
        self._worker = WorkerSide(config, cast(Any, cache), Config(**settings))
        self._worker._agent = self.agent
        self._worker._model = cast(Any, _Weights(self.agent._facts, None, self.agent.submit))
        caches = {f"layer {n}": CacheId(n, "model/attention") for n in self._layers}
        if hooks_tell_layers(config, caches):
            self._worker._layers = {name: cache.number for name, cache in caches.items()}
        self._worker._next_compare = float("inf")
        self.peer = Peer(Source("127.0.0.1", self.agent.port, engine_id), geometry.shard)
        if self.agent.port:
            self.side.set_peers((self.peer,))

    def close(self) -> None:
        self.agent.close()

    @property
    def busy(self) -> bool:
        """Whether requests, or steps whose outcome its scheduler has not been told, are left."""
        return bool(self.scheduler.requests or self._untold)

    def sleep(self) -> bool:
        """Sleep and wake up, as vLLM 0.33 does with `mode=keep`; the pages lose what they held. Returns whether it did: it
        does not while requests hold pages that nothing is computed in."""
        try:
            self.scheduler.reset_prefix_cache(True, reset_connector=True)
        except RuntimeError:
            return False
        self._worker.sleep()
        for _, pages in self._layers.values():
            pages.fill_(-1.0)
        time.sleep(0.02)  # the agent's thread may do what it likes
        self._worker.wake()
        return True

    def step(self, *_: Any, **__: Any) -> list[Any]:
        """One step: scheduled, computed, and its outcome told; `ahead`, the outcome of the step before is told."""
        output = self.scheduler.schedule()
        self._untold.append(self.run(output))
        ahead = self._ahead and output.total_num_scheduled_tokens > 0
        while len(self._untold) > ahead:
            self.settle(self._untold.popleft())
        return []

    def run(self, output: SchedulerOutput) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """The worker's part of a step."""
        told = output.kv_connector_metadata
        assert isinstance(told, StepCommands)
        if self._late:
            self._prepare(output)
            self._worker.take_back(told)
        else:
            self._worker.take_back(told)
            self._prepare(output)
        self._worker.begin(told)
        self.commands += told.commands
        for number in sorted(self._layers):
            counts = list(output.num_scheduled_tokens.items())
            for part in range(self._parts):
                time.sleep(self.pause_s)
                for request, count in counts[part :: self._parts]:
                    self._compute(number, request, self._computed[request], count)
                if counts:
                    self._worker.layer_computed(f"layer {number}")
        if self._drafts:
            result = self._result(output)
            self._worker.end()
        else:
            self._worker.end()
            result = self._result(output)
        return output, result

    def settle(self, done: tuple[SchedulerOutput, ModelRunnerOutput]) -> None:
        """The scheduler hears of a step's end."""
        for outputs in self.scheduler.update_from_output(*done).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.ended[one.request_id] = one.finish_reason
                    self.answers[one.request_id] = one.kv_transfer_params

    def _prepare(self, output: SchedulerOutput) -> None:
        """Bring the rows up to date, and zero and copy pages."""
        for page in output.new_block_ids_to_zero or ():
            for _, pages in self._layers.values():
                pages[page] = 0
        for copied in output.kv_cache_block_copies or ():
            for _, pages in self._layers.values():
                pages[copied.dst_block_id] = pages[copied.src_block_id]
        for request in output.finished_req_ids:
            self._rows.pop(request, None)
        self._computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids or ())
            row = self._rows[new.req_id] = _Row(prompt, len(prompt))
            row.pages = [list(table) for table in new.block_ids]
            self._computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request, tables, computed, said in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            row = self._rows[request]
            self._computed[request] = computed
            if request in cached.resumed_req_ids:
                row.pages = [list(table) for table in tables or ()]
                del row.tokens[row.prompt + said :]  # what was on its way is dropped
            else:
                for mine, added in zip(row.pages, tables or (), strict=False):
                    mine.extend(added)

    def _compute(self, number: int, request: str, computed: int, count: int) -> None:
        """A layer attends to the tokens before, and keeps what it computes of the step's own."""
        table, pages = self._layers[number]
        size = self._specs[table].block_size
        kept = getattr(self._specs[table], "sliding_window", 0) or 0
        row = self._rows[request]
        first = max(0, computed - kept + 1) if kept else 0
        stop = computed + count
        wanted = kv_of(number, marks(row.tokens[:stop])[first:])
        places = torch.arange(first, stop)
        listed = torch.tensor(row.pages[table])[places // size], places % size
        own = computed - first
        pages[listed[0][own:], 0, listed[1][own:]] = wanted[own:]
        for place in (pages[listed[0], 0, listed[1]] != wanted).any(dim=1).nonzero().flatten():
            page = int(listed[0][place])
            self.wrong.append(
                f"{self.name}: {request} layer {number} token {first + place} page {page}"
            )

    def _result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        sampled: list[list[int]] = []
        names = list(output.num_scheduled_tokens)
        for request in names:
            row = self._rows[request]
            done = self._computed[request] + output.num_scheduled_tokens[request]
            if done >= len(row.tokens):
                row.tokens.append(next_token(row.tokens))
                sampled.append([row.tokens[-1]])
            else:
                sampled.append([])
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        sent, received, failed = self._worker.outcomes()
        result.kv_connector_output = KVConnectorOutput(
            finished_sending=sent or None,
            finished_recving=received or None,
            failed_recving=failed or None,
            invalid_block_ids=self._worker.fills.take_invalid_pages(),
            kv_connector_worker_meta=self._worker.activity(),
        )
        return result


def until_over(engines: Sequence[ComputingEngine], over: Callable[[], bool]) -> None:
    """Step all engines in turn."""
    stop = time.monotonic() + 60
    while not over():
        assert time.monotonic() < stop, "it comes to no end"
        for engine in engines:
            engine.step()


def answered(request: Request) -> list[int]:
    """What a model says that computes everything itself."""
    tokens = list(request.prompt_token_ids or ())
    for _ in range(request.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[request.num_prompt_tokens :]
