# SPDX-License-Identifier: Apache-2.0
"""The door's part of one SGLang scheduler process: it starts the rank's agent, follows the scheduler's steps, and knows the
prefill engines."""

import contextlib
import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVManager, KVArgs
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode

from pd_connector.agent.advertised_model import DraftFiles
from pd_connector.agent.agent import Agent
from pd_connector.agent.idle_backoff import IdleBackoff
from pd_connector.config import CONFIG_VARIABLE
from pd_connector.control.seal import sealed
from pd_connector.errors import Cause
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.wire import about
from pd_connector.protocol.wire.final_token import FIRST_TOKEN
from pd_connector.protocol.wire.params import ProducerAddress
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.protocol.wire.prefill_server import PrefillServer
from pd_connector.sglang.adapters import Adapters
from pd_connector.sglang.admission import Admission
from pd_connector.sglang.cache import describe_cache, own_shard
from pd_connector.sglang.drafts import draft_model, drafts_of
from pd_connector.sglang.engine_ranks import EngineRanks
from pd_connector.sglang.metrics import Metrics
from pd_connector.sglang.model import (
    kv_heads,
    kv_scales,
    loaded_files,
    loaded_weights,
    model_facts,
)
from pd_connector.sglang.prefill_engines import LookupResult, PrefillEngines, look_up_often
from pd_connector.sglang.rank import PoolPages, Rank
from pd_connector.sglang.recompute import REPEATABLE, SecondPrefill, SecondPrefills
from pd_connector.sglang.registry import global_rank, register
from pd_connector.sglang.settings import load_config
from pd_connector.sglang.states import state_parts
from pd_connector.sglang.streaming import Streaming
from pd_connector.sglang.support import check_described, check_supported
from pd_connector.sglang.weights import SGLangWeights

logger = logging.getLogger("pd_connector.sglang")

_WEIGHTS = "_pd_connector_weights"
"""The scheduler's attribute that keeps the `SGLangWeights` while the engine changes its side."""


class Manager(BaseKVManager):
    """Used by the scheduler's thread. It works from `attach` on.

    Attributes:
        rank: what the rank's requests share.
        agent: agent of this rank.
        cache: the cache whose KV the agent moves.
        weights: watches the model's weights.
        prefill_info_table: prefill engines by address, in SGLang's terms: it looks there whether an
            engine is known, and how many data-parallel ranks it has.
    """

    rank: Rank
    agent: Agent
    cache: PagedCache
    weights: SGLangWeights
    supports_role_switch = True  # SGLang asks before `/pd_role_switch`

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
        self._streaming: Streaming | None = None
        self._metrics: Metrics | None = None
        self._config = load_config(os.environ.get(CONFIG_VARIABLE, ""))
        self._engines = PrefillEngines(self._config)
        api_key = getattr(server_args, "api_key", None) or ""
        self._second_prefills = SecondPrefills(api_key, self._config)

    def attach(self, queue: Any) -> None:
        """Start the agent, and make the engine known.

        Args:
            queue: SGLang's queue that has made this manager.

        Raises:
            PDConnectorError: the engine is set up for what cannot be moved; it does not start then.
        """
        from sglang.srt.runtime_context import get_parallel

        parallel, scheduler, pool = get_parallel(), queue.scheduler, queue.token_to_kv_pool
        check_supported(self.kv_args, self._server_args, parallel)
        self._scheduler = scheduler
        self._ranks = parallel.attn_tp_size * parallel.pp_size
        self._drafts = drafts_of(queue)
        model = scheduler.tp_worker.model_runner.model
        self._backoff = IdleBackoff(alone=parallel.world_group.world_size == 1)
        cache = describe_cache(
            pool,
            kv_heads(model),
            own_shard(pool, parallel.attn_tp_rank, parallel.attn_tp_size),
            sliding_window=scheduler.sliding_window_size or 0,
            scales=kv_scales(model),
            parts=state_parts(model),
            draft=self._drafts.cache if self._drafts else None,
        )
        check_described(self.kv_args, cache.geometry)
        self.cache = cache
        self._start_agent(cache, parallel)
        self._make_rank(queue, cache, parallel)
        if self._server_args.enable_metrics:
            self._metrics = Metrics(self.agent.telemetry, global_rank(parallel))
        logger.info(
            "PDConnector ready: engine %s, %s, control port %s:%d, data port %d, transports %s, %s",
            self._address.engine_id,
            "prefill" if self._produces else "decode",
            self._config.host,
            self.agent.port,
            self.agent.data_port,
            self.agent.transports,
            cache.geometry,
        )
        if self._produces:
            self._attach_prefill(pool)
        else:
            self._attach_decode(queue)

    def _make_rank(self, queue: Any, cache: PagedCache, parallel: Any) -> None:
        pool, buffers = queue.token_to_kv_pool, queue.metadata_buffers
        geometry, vocabulary = cache.geometry, self._scheduler.model_config.vocab_size
        self.rank = Rank(
            self.agent,
            Admission(
                produces=self._produces,
                vocabulary=vocabulary,
                most_logprobs=buffers.output_top_logprobs_idx.shape[1],
                in_step=parallel.pp_size == 1,
            ),
            buffers,
            PoolPages(
                self._scheduler,
                pool.page_size,
                limit=pool.size // pool.page_size + 1,  # page 0 is padding
                windows=any(group.window for group in geometry.groups),
                slots=pool.mamba_pool.size + 1 if hasattr(pool, "mamba_pool") else 0,
            ),
            Adapters(self._scheduler.tp_worker.model_runner),
            produces=self._produces,
            offers_early=self._config.overlap != "off",
            leads=parallel.attn_tp_rank == 0 and geometry.shard.first_layer == 0,
            vocabulary=vocabulary,
            drafted=self._drafts.tokens if self._drafts else 0,
            draft_vocabulary=self._drafts.vocabulary if self._drafts else 0,
        )

    def _attach_prefill(self, pool: Any) -> None:
        if self.rank.offers_early:
            # The draft model's layers are computed after the model's own, which alone are seen one by one.
            layers = self._config.overlap in ("auto", "layer") and self._drafts is None
            self._streaming = Streaming(self.rank, self._scheduler, pool, layers=layers)
        self.register_to_bootstrap()

    def _attach_decode(self, queue: Any) -> None:
        look_up_often(queue)
        admission = self.rank.admission
        admission.page_size = queue.token_to_kv_pool.page_size
        most = queue.max_total_num_tokens - queue.num_reserved_decode_tokens
        admission.most_prompt_tokens = most

    def _start_agent(self, cache: PagedCache, parallel: Any) -> None:
        """Start this rank's agent, and introduce the other ranks that hold parts of the model."""
        shard = cache.geometry.shard
        ranks = EngineRanks(parallel, shard)
        engine_id = ranks.engine_id
        watch: SGLangWeights | None = getattr(self._scheduler, _WEIGHTS, None)
        draft = draft_model(self._drafts, self._config)
        if watch is None:
            loaded, files = loaded_weights(self._scheduler), loaded_files(self._scheduler)
            facts = model_facts(self._scheduler, self._config, shard, loaded, files, draft)
        else:
            facts = watch.facts
        words = (FIRST_TOKEN, *([self._drafts.form] if self._drafts else ()))
        self.agent = Agent(
            self._config,
            engine_id,
            facts,
            cache,
            produces=self._produces,
            consumes=not self._produces,
            shards=ranks.shards,
            tells=words if self._produces else (),
            needs=() if self._produces else words,
        )
        if watch is None:
            watch = SGLangWeights(
                self._scheduler,
                facts,
                loaded,
                files,
                self.agent.submit,
                draft=draft if isinstance(draft, DraftFiles) else None,
                drafts=partial(draft_model, self._drafts, self._config),
            )
            setattr(self._scheduler, _WEIGHTS, watch)
        else:
            watch.tell_to(self.agent.submit)
        self.weights = watch
        peers = ranks.gather(Peer(Source(self._config.host, self.agent.port, engine_id), shard))
        self.agent.introduce(peers)
        states = any(group.kind == "state" for group in cache.geometry.groups)
        address = ProducerAddress(engine_id, peers, keeps_states=states)
        self._address = sealed(address, self._config.key)

    def teardown(self) -> None:
        """SGLang changes the engine's side, and makes another manager. The scheduler is idle.

        Frees the sockets, threads and memory of this manager. The weights' fingerprint is kept for the next manager.
        """
        if self._streaming is not None:
            self._streaming.close()
        # Weights may change until the next manager is there. Its agent gets the facts of then.
        self.weights.tell_to(lambda command: None)
        self.agent.close()
        if self._metrics is not None:
            self._metrics.close()
        self._engines.close()
        self._second_prefills.close()
        logger.info("engine %s ends: SGLang changes its side", self._address.engine_id)

    @contextlib.contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Within, the scheduler computes the batch."""
        self.agent.engine_steps()
        self._backoff.reset()
        self.weights.step()
        with self._streaming.step(batch) if self._streaming else contextlib.nullcontext():
            yield

    def idle(self) -> None:
        """The scheduler has nothing to compute: pause, because its loop would take Python's lock from the agent's
        thread, which needs it to move KV."""
        self.agent.engine_steps()
        self._backoff.pause(self.agent.wait_for_outcome)

    def register_to_bootstrap(self) -> None:
        """Tell SGLang's registry this rank's control port."""
        register(self.kv_args, self._config.host, self.agent.port)

    def describe(self) -> dict[str, Any]:
        """The state that this engine reports: its side, which `/pd_role_switch` changes, its description, and a prefill
        engine's address. A router needs the address to name it to a decode engine of another kind."""
        side = "prefill" if self._produces else "decode"
        address = self._address.fields() if self._produces else {}
        return {"side": side, **address, **about.written(self.weights.facts)}

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the prefill engine at this address is known, or known not to be there. Asks for it
        and does not wait."""
        engine = self._engines.look_up(bootstrap_addr)
        if engine is None:
            return False
        self.prefill_info_table[bootstrap_addr] = PrefillServerInfo(
            attn_tp_size=1,
            attn_cp_size=1,
            dp_size=max(1, len(engine.replicas)),
            pp_size=1,
            page_size=None,
            kv_cache_dtype=None,
            follow_bootstrap_room=True,
        )
        return True

    def prefill_engine(self, address: str) -> LookupResult:
        """What is known of the prefill engine at this address."""
        engine = self.look_up(address)
        if engine is None:
            engine = LookupResult(
                (), (Cause.UNREACHABLE, f"prefill engine at {address} was forgotten")
            )
        if engine.problem is not None:
            self.forget_prefill_engine(address)
        return engine

    def look_up(self, address: str) -> LookupResult | None:
        """The same; None while the look-up runs."""
        return self._engines.look_up(address)

    def compute_again(
        self, req: Any, address: str, cause: Cause, rest: dict[str, Any] | None = None
    ) -> SecondPrefill | None:
        """Have the prefill engine at this address compute a request's prompt once more; None if the config forbids it,
        or it is not possible.

        It is not possible with several ranks: each rank has failures of its own, but all would have to switch to the
        second attempt together.

        Args:
            rest: SGLang's own body for a request that it has retracted.
        """
        if self._config.on_failure != "recompute" or cause not in REPEATABLE or self._ranks > 1:
            return None
        again = self._second_prefills.ask(req, address, rest)
        if again is not None:
            self.agent.telemetry.count("second_prefills", cause=cause)
            logger.warning(
                "request %s: its KV did not come (%s), %s computes it again",
                *(req.rid, cause, address),
            )
        return again

    def forget_prefill_engine(self, address: str) -> None:
        """It does not answer: the next request asks for it again."""
        self.prefill_info_table.pop(address, None)
        self._engines.forget(address)

    def submit_prefill_recompute(self, kv_receiver: Any, payload: dict[str, Any]) -> None:
        """SGLang needs a prompt computed again by the prefill engine, because its weights have changed
        (`pause_generation` with mode `retract`)."""
        kv_receiver.compute_again(payload)

    def resume(
        self, body: dict[str, Any], address: str, server: PrefillServer | None
    ) -> SecondPrefill | None:
        """Have the prefill engine at this address compute the prompt of a retracted request, and its answer so far. One
        rank sends the request for all ranks; the others return None."""
        return self._second_prefills.send(body, address, server) if self.rank.leads else None
