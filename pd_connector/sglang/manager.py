# SPDX-License-Identifier: Apache-2.0
"""What the requests of one rank share: its agent, what the agent has told, and the prefill engines
that are known. SGLang makes one in each scheduler process."""

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.disaggregation.base.conn import BaseKVManager, KVArgs
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode

from pd_connector.agent.agent import Agent
from pd_connector.agent.idle_backoff import IdleBackoff
from pd_connector.agent.owed import Outcome
from pd_connector.config import CONFIG_VARIABLE, Config
from pd_connector.errors import Cause, ConfigError
from pd_connector.protocol.incoming import Finished, Held
from pd_connector.protocol.last_words import FIRST_TOKEN
from pd_connector.protocol.outgoing import Free
from pd_connector.protocol.peers import Peer, Source
from pd_connector.sglang.cache import describe_cache, own_shard
from pd_connector.sglang.metrics import Metrics
from pd_connector.sglang.model import model_facts
from pd_connector.sglang.prefill_engines import Found, PrefillEngines
from pd_connector.sglang.registration import register
from pd_connector.sglang.streaming import Streaming
from pd_connector.sglang.support import check_supported

logger = logging.getLogger("pd_connector.sglang")

Kind = TypeVar("Kind", Free, Finished, Held)


class Manager(BaseKVManager):
    """Used by the scheduler's thread. It works from `attach` on.

    Attributes:
        agent: of this rank.
        buffers: SGLang's metadata buffers.
        page_size: tokens of a page.
        prefill_info_table: prefill engines by address, in SGLang's terms: it looks there whether an
            engine is known, and how many data-parallel ranks it has.
    """

    agent: Agent
    buffers: Any
    page_size: int

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: Any,
        is_mla_backend: bool | None = False,
    ) -> None:
        self.kv_args = args
        self.prefill_info_table: dict[str, PrefillServerInfo] = {}
        self._produces = disaggregation_mode == DisaggregationMode.PREFILL
        self._server_args = server_args
        self._told: dict[tuple[type[Outcome], str], Outcome] = {}
        self._watched: set[str] = set()
        self._streaming: Streaming | None = None
        self._config = load_config(os.environ.get(CONFIG_VARIABLE, ""))
        self._engines = PrefillEngines(self._config)

    def attach(self, queue: Any) -> None:
        """Start the agent, and make the engine known.

        Args:
            queue: SGLang's queue that has made this manager.

        Raises:
            PDConnectorError: the engine is set up for what cannot be moved; it does not start then.
        """
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        check_supported(self.kv_args, self._server_args, parallel)
        pool, model = queue.token_to_kv_pool, queue.scheduler.model_config
        self.buffers = queue.metadata_buffers
        self.page_size = pool.page_size
        self._scheduler = queue.scheduler
        rank, size = parallel.attn_tp_rank, parallel.attn_tp_size
        self._backoff = IdleBackoff(alone=size == 1)
        shard = own_shard(pool, rank, size)
        cache = describe_cache(pool, model.get_total_num_kv_heads(), shard)
        group = parallel.attn_tp_group
        name = f"sglang-{uuid.uuid4().hex[:12]}"
        engine_id = group.all_gather_object(name)[0]  # one name for all ranks
        shards = group.all_gather_object(shard)
        self.agent = Agent(
            self._config,
            engine_id,
            b"",  # of schema 2, which no SGLang has spoken
            cache,
            produces=self._produces,
            consumes=not self._produces,
            shards=shards,
            tells=(FIRST_TOKEN,) if self._produces else (),
            needs=() if self._produces else (FIRST_TOKEN,),
            facts=model_facts(queue.scheduler, self._config, shard),
        )
        if self._server_args.enable_metrics:
            self._metrics = Metrics(self.agent.telemetry, rank)
        own = Peer(Source(self._config.host, self.agent.port, engine_id), shard)
        self.agent.introduce(group.all_gather_object(own))
        logger.info(
            "PDConnector ready: engine %s, %s, control port %s:%d, transports %s, %s",
            engine_id,
            "prefill" if self._produces else "decode",
            self._config.host,
            self.agent.port,
            ",".join(self._config.transports),
            cache.geometry,
        )
        if self._produces:
            if self._config.overlap in ("auto", "layer"):
                self._streaming = Streaming(self, queue.scheduler)
            self.register_to_bootstrap()

    @contextlib.contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Within, the scheduler computes the batch."""
        self.agent.engine_steps()
        self._backoff.reset()
        with self._streaming.step(batch) if self._streaming else contextlib.nullcontext():
            yield

    def idle(self) -> None:
        """The scheduler has nothing to compute, and would turn without pause. Where KV is under way,
        the agent's thread needs Python's lock to move it."""
        self.agent.engine_steps()
        self._backoff.pause(self.agent.wait_for_outcome)

    def register_to_bootstrap(self) -> None:
        """Tell SGLang's registry this rank's control port."""
        register(self.kv_args, self._config.host, self.agent.port)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the prefill engine at this address is known, or known not to be there. Asks for it
        and does not wait."""
        if self._engines.look_up(bootstrap_addr) is None:
            return False
        self.prefill_info_table[bootstrap_addr] = PrefillServerInfo(
            attn_tp_size=1,
            attn_cp_size=1,
            dp_size=1,
            pp_size=1,
            page_size=None,
            kv_cache_dtype=None,
            follow_bootstrap_room=True,
        )
        return True

    def prefill_engine(self, address: str) -> Found:
        """What is known of the prefill engine at this address."""
        found = self._engines.look_up(address)
        if found is None:
            found = Found((), (Cause.UNREACHABLE, f"prefill engine at {address} was forgotten"))
        if found.problem is not None:
            self.forget_prefill_engine(address)
        return found

    def forget_prefill_engine(self, address: str) -> None:
        """It does not answer: who comes next asks for it anew."""
        self.prefill_info_table.pop(address, None)
        self._engines.forget(address)

    def submit_prefill_recompute(self, kv_receiver: Any, payload: dict[str, Any]) -> None:
        """SGLang wants a prompt computed again by the prefill engine, because its weights have changed
        (`pause_generation` with mode `retract`)."""
        kv_receiver.fail(
            Cause.ROLE, "a retracted request is not computed again by a prefill engine"
        )

    def watch(self, request: str) -> None:
        """Keep what the agent tells of this request, until `forget`."""
        self._watched.add(request)

    def outcome(self, kind: type[Kind], request: str) -> Kind | None:
        """Take what the agent has told of a request, if that is of this kind."""
        for told in self.agent.outcomes():
            if told.request in self._watched:
                self._told[type(told), told.request] = told
        found = self._told.pop((kind, request), None)
        assert found is None or isinstance(found, kind)
        return found

    def forget(self, request: str) -> None:
        """The request is over."""
        self._watched.discard(request)
        for kind in (Free, Finished, Held):
            self._told.pop((kind, request), None)

    def forward_fence(self) -> Any:
        """A point in the stream on which SGLang computes: a forward pass that is under way may still
        write pages of a request that has just ended. None on a CPU."""
        stream = getattr(self._scheduler, "forward_stream", None)
        return stream.record_event() if isinstance(stream, torch.cuda.Stream) else None

    @staticmethod
    def request_name(rid: str, room: int) -> str:
        """What the agent calls a request: SGLang's own ids may come twice."""
        return f"{room}/{rid}"


def load_config(text: str) -> Config:
    """The config in a variable's text. Raises ConfigError."""
    if not text.strip():
        return Config.load({})
    try:
        found = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{CONFIG_VARIABLE} {text!r}: {error}; set it to a JSON object of config keys, or to @ "
            "and the path of a file that holds one"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{CONFIG_VARIABLE} {text!r}: must be a JSON object of config keys")
    if (audit := found.get("audit", "off")) != "off":
        raise ConfigError(
            f"audit {audit!r}: a decode engine of SGLang cannot compute a prompt, and so has nothing to compare KV "
            "with; leave it out (config key audit)"
        )
    return Config.load(found)
