# SPDX-License-Identifier: Apache-2.0
"""A rank of SGLang that uses the pool: its cache, its weights, the store, and the pool parameters of its requests."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec

from pd_connector.agent.commands import ChangeModel, Command, KnowWeights
from pd_connector.agent.pending_outcomes import Outcome
from pd_connector.agent.pool_side import accelerator
from pd_connector.codec import COMPILER
from pd_connector.config import Config
from pd_connector.errors import PDConnectorError
from pd_connector.kv.coding import RAW, coarsest
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.pool.advertised import ENGINE_VARIABLE, AdvertisedEngine
from pd_connector.pool.ask import PoolAsk, read_ask
from pd_connector.pool.codecs import pool_codecs
from pd_connector.pool.host import open_pool
from pd_connector.pool.keys import CHUNK_TOKENS, model_root
from pd_connector.pool.loader import Loader
from pd_connector.pool.record import Writer
from pd_connector.pool.settings import PoolSettings
from pd_connector.pool.store.base import FAR, Found, Store
from pd_connector.pool.trust import WriterTrust
from pd_connector.sglang.adapters import Adapters
from pd_connector.sglang.cache import describe_cache, own_shard
from pd_connector.sglang.engine_ranks import EngineRanks
from pd_connector.sglang.metrics import Metrics
from pd_connector.sglang.model import (
    kv_heads,
    kv_scales,
    loaded_files,
    loaded_weights,
    model_facts,
)
from pd_connector.sglang.pool_chunks import HeldChunk, HeldChunks
from pd_connector.sglang.pool_prompts import Apart, PoolPrompts, chunks_of, salt_of
from pd_connector.sglang.pool_settings import check_kv_pool, check_model
from pd_connector.sglang.pool_thread import PoolThread
from pd_connector.sglang.registry import global_rank
from pd_connector.sglang.weights import SGLangWeights
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.sglang")

_BESIDE_TOKENS = (
    "input_embeds",
    "positional_embed_overrides",
    "multi_item_delimiter_indices",
    "multimodal_inputs",
    "session",
)
"""Attributes of a request whose token ids alone do not say what its KV is."""
_ASK = "_pd_connector_pool"
"""Attribute of a request: what its client wants of the pool, once it was read."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class RankCache(NamedTuple):
    """A rank's part of its engine.

    Attributes:
        caches: the rank's pages, twice: for the thread that copies chunks into them, and for the one that copies out of them.
        engine_id: its engine's id.
        ranks: number of its engine's ranks.
        leads: whether this rank counts metrics for its engine.
        experts: whether the model is a mixture of experts.
        advertised_as: the engine's id as its API server knows it; empty: `engine_id`.
        consumes: whether prefill engines compute its prompts, and load from the pool. This engine then only saves.
    """

    caches: tuple[PagedCache, PagedCache]
    engine_id: str
    ranks: int
    leads: bool = True
    experts: bool = False
    advertised_as: str = ""
    consumes: bool = False


class PoolRank:
    """Used by the scheduler's thread.

    Attributes:
        loads: the rank's cache, for the thread that copies chunks into pages.
        prompts: the prompts that wait for chunks.
        thread: copies chunks out of pages.
        facts: the model, as far as it is known.
        watch: watches the weights.

    Args:
        facts: the model when the engine starts.
        watch: makes the object that watches the weights; called with a function that takes changes.
        ended: called at the end of each save and comparison.
        metrics: makes the object that exports these counts; None: they are not exported here.
        telemetry: the counts, if another object exports them.
        adapters: the adapters that the rank has loaded; None for none.
        handoffs: the cache from which the rank hands KV over; None if it does not.
    """

    def __init__(
        self,
        rank: RankCache,
        config: Config,
        store: Store,
        settings: PoolSettings,
        facts: ModelFacts,
        watch: Callable[[Callable[[Command], None]], SGLangWeights],
        ended: Callable[[Outcome], None],
        metrics: Callable[[Telemetry], Metrics] | None = None,
        telemetry: Telemetry | None = None,
        adapters: Adapters | None = None,
        handoffs: PagedCache | None = None,
    ) -> None:
        codecs = pool_codecs(config, consumes=rank.consumes)
        settings = settings.within(codecs)
        self._store, self._settings = store, settings
        self._adapters, self._handoffs = adapters, handoffs
        self._loads = settings.read and not rank.consumes
        self._engine_id, self._leads = rank.engine_id, rank.leads
        self.loads, saves = rank.caches
        if self.loads.on_host and any(codec != RAW.name for codec in codecs.readable):
            COMPILER.begin()
        self.telemetry = telemetry or Telemetry()
        self.facts = facts
        self._root: tuple[ModelFacts | None, bytes] = (None, b"")
        self._advertised = b""
        self._advertised_as = rank.advertised_as or rank.engine_id
        trust = WriterTrust(self._engine_id, audits=config.audit != "off")
        kind = f"sglang {version('sglang')} on {accelerator(saves.device)}"
        if rank.consumes:  # it has compared nothing, so its chunks are not believed with those of engines that compute
            kind += ", handed over"
        self.thread = PoolThread(
            saves,
            self.telemetry,
            facts,
            store,
            trust,
            Writer(kind, self._engine_id, codecs.passed),
            codecs,
            rank.ranks,
            ended,
            experts=rank.experts,
        )
        loader = Loader(store, self.loads.geometry, codecs.readable)
        self.prompts = PoolPrompts(
            store,
            lambda progressed: HeldChunks(loader, self.loads.geometry, progressed),
            trust,
            codecs.readable,
            self.telemetry,
            counts=self._leads,
        )
        self._stepped: tuple[float, int] = (0.0, 0)
        self.watch = watch(self._submit)
        self._changes = self.watch.changes
        self._metrics = metrics(self.telemetry) if metrics else None

    @classmethod
    def of(
        cls,
        scheduler: Any,
        pool: Any,
        config: Config,
        ended: Callable[[Outcome], None],
        manager: Any = None,
    ) -> "PoolRank":
        """The rank of an SGLang scheduler.

        Args:
            pool: SGLang's pool of KV.
            manager: manager of this rank's handoffs (`Manager`); None if the engine works alone.

        Raises:
            PDConnectorError: the engine is set up for what the pool cannot keep.
        """
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        check_model(scheduler, parallel)
        check_kv_pool(pool, scheduler.token_to_kv_pool_allocator)
        opened = open_pool(config.pool)
        assert opened is not None
        shard = own_shard(pool, parallel.attn_tp_rank, parallel.attn_tp_size)
        model = scheduler.tp_worker.model_runner.model
        copying, saving = (
            describe_cache(
                pool,
                kv_heads(model),
                shard,
                sliding_window=scheduler.sliding_window_size or 0,
                scales=kv_scales(model),
            )
            for _ in range(2)
        )
        ranks = EngineRanks(parallel, shard)
        text = scheduler.model_config.hf_text_config
        rank = RankCache(
            (copying, saving),
            ranks.engine_id,
            len(ranks.shards),
            leads=parallel.attn_tp_rank == 0,
            experts=any(getattr(text, name, 0) for name in _EXPERTS),
            advertised_as=_advertised_as(parallel),
            consumes=scheduler.server_args.disaggregation_mode == "decode",
        )
        loaded, files = loaded_weights(scheduler), loaded_files(scheduler)
        facts = model_facts(scheduler, config, shard, loaded, files)

        def watch(submit: Callable[[Command], None]) -> SGLangWeights:
            return SGLangWeights(scheduler, facts, loaded, files, submit, waits=False)

        def metrics(telemetry: Telemetry) -> Metrics:
            return Metrics(telemetry, global_rank(parallel))

        # One agent's metrics are the rank's: those of handoffs show what the pool counts, too.
        shows = metrics if scheduler.server_args.enable_metrics and manager is None else None
        telemetry = manager.agent.telemetry if manager is not None else None
        adapters = Adapters(scheduler.tp_worker.model_runner)
        handoffs = manager.cache if manager is not None else None
        made = cls(rank, config, *opened, facts, watch, ended, shows, telemetry, adapters, handoffs)
        settings = opened[1]
        logger.info(
            "PDConnector's pool ready: engine %s, %s, reads %s, writes %s",
            *(ranks.engine_id, copying.geometry, settings.read, settings.write),
        )
        return made

    @property
    def model(self) -> bytes:
        """`keys.model_root` of the weights that compute now, and that computed all KV in SGLang's cache; empty: not known."""
        if self.watch.withdrawn:
            return b""
        facts = self.facts = self.watch.facts
        if self._root[0] is not facts:  # it is another object once it says something else
            root = model_root(facts) or b""
            self._root = facts, root
            if root:
                logger.info("pool: in use")
        return self._root[1]

    def _submit(self, command: Command) -> None:
        """Take a change or the fingerprint of the weights. Can be called by the thread that reads the weights."""
        if isinstance(command, ChangeModel | KnowWeights):
            self.thread.submit(command)

    def stepped(self, tokens: int) -> None:
        """A step begins that computes these tokens of prompts; 0: none."""
        now = time.monotonic()
        began, before = self._stepped
        if before >= CHUNK_TOKENS:
            self.prompts.breakeven.computed(before, now - began)
        self._stepped = now, tokens
        self.watch.step()
        if self.watch.changes != self._changes:
            self.forget()
        try:
            self._advertise()
        except Exception:  # routers do without it
            logger.exception("pool: this engine cannot tell its API server what it is")

    def forget(self) -> None:
        """The weights have changed, or will."""
        self._changes = self.watch.changes
        self.prompts.forget()

    def holds(self, chunks: Iterable[HeldChunk]) -> None:
        """KV of these chunks comes into pages: what is handed over from now on may depend on it, and names their codecs."""
        if self._handoffs is not None:
            parts = (part for chunk in chunks if chunk.ready for part in chunk.ready.read.parts)
            codecs = (part.codec for part in parts)
            self._handoffs.passed = coarsest((self._handoffs.passed, *codecs))

    def loaded(self, hits: Sequence[Found]) -> None:
        """Chunks were copied into pages."""
        self.telemetry.count("pool_loaded_bytes", sum(hit.nbytes for hit in hits))
        if self._leads:
            self.telemetry.count("pool_hits", len(hits))
            self.telemetry.count("pool_far_hits", sum(hit.tier == FAR for hit in hits))

    def _advertise(self) -> None:
        """Advertise the facts that routers need to the engine's API server, if they have changed."""
        if not self._leads:
            return
        about = AdvertisedEngine(
            engine=self._advertised_as,
            model=self.model.hex(),
            chunk_bytes=self.prompts.chunk_bytes,
            bytes_per_s=self.prompts.breakeven.bytes_per_s(),
        ).encode()
        if about != self._advertised:
            self._advertised = about
            self._store.advertise(about)

    def ask(self, req: Any) -> PoolAsk:
        """A request's pool parameters. Invalid parameters are ignored, and logged once."""
        ask: PoolAsk | None = getattr(req, _ASK, None)
        if ask is None:
            ask = self._read_ask(req)
            setattr(req, _ASK, ask)
        return ask

    def _read_ask(self, req: Any) -> PoolAsk:
        given = getattr(req.sampling_params, "custom_params", None)
        try:
            ask = read_ask(given.get("pool") if isinstance(given, dict) else None)
        except ValueError as error:
            logger.warning("request %s: %s; the pool is not used for it", req.rid, error)
            return PoolAsk(read=False, write=False)
        if ask.tenant and ask.tenant not in self._settings.tenants:
            logger.warning(
                "request %s: pool.tenant %r: not in the config key pool.tenants; its chunks take the share of requests "
                "without a tenant",
                *(req.rid, ask.tenant),
            )
            ask = msgspec.structs.replace(ask, tenant="")
        return ask

    def takes(self, req: Any) -> bool:
        """Whether tokens and adapter say what a request's KV is. The same on all ranks."""
        return not any(getattr(req, name, None) is not None for name in _BESIDE_TOKENS)

    def apart(self, req: Any) -> Apart | None:
        """What keeps a request's chunks apart from others. None: this rank does not know its adapter's content."""
        salt = salt_of(req.cache_salt, req.extra_key, req.lora_id)
        if req.lora_id is None:
            return Apart(salt)
        try:
            return Apart(salt, self._adapters.content(req.lora_id)) if self._adapters else None
        except PDConnectorError as error:
            logger.debug("request %s: the pool is not used for it: %s", req.rid, error)
            return None

    def reads(self, req: Any) -> bool:
        """Whether chunks of the pool are used for a request. The same on all ranks."""
        return self._loads and self.takes(req) and self.ask(req).read

    @property
    def saves(self) -> bool:
        """Whether this engine saves chunks at all."""
        return self._settings.write

    def writes(self, req: Any) -> bool:
        """Whether its chunks are saved. The same on all ranks."""
        return self._settings.write and self.ask(req).write

    def tenant(self, req: Any) -> str:
        """Whose share of the pool its chunks take."""
        return self.ask(req).tenant

    def over(self, req: Any) -> None:
        """A request has ended: pin the chunks of its prompt for the time that its client has chosen."""
        ask, model = self.ask(req), self.model
        if not ask.pin_s or not self._leads or not model or not self.takes(req):
            return
        if (apart := self.apart(req)) is None:
            return
        keys = [chunk.key for chunk in chunks_of(model, req.origin_input_ids, apart)]
        tenants = 1 + len(self._settings.tenants)
        self.prompts.pins.pin(keys, ask.pin_s, self.tenant(req), tenants)

    def close(self) -> None:
        """End the threads. The store stays open: it is the process's."""
        self.prompts.close()
        self.thread.close()
        self.watch.close()
        if self._metrics is not None:
            self._metrics.close()


def _advertised_as(parallel: Any) -> str:
    """The id by which the engine's API server finds this replica."""
    engine = os.environ.get(ENGINE_VARIABLE, "")
    replicas = max(parallel.dp_size, 1)
    return f"{engine}_dp{parallel.dp_rank or 0}" if engine and replicas > 1 else engine
