# SPDX-License-Identifier: Apache-2.0
"""What a rank of SGLang needs to use the pool: its cache, its weights, the store, and what requests ask for."""

import logging
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from pd_connector.agent.commands import ChangeModel, Command, KnowWeights
from pd_connector.agent.pending_outcomes import Outcome
from pd_connector.codec import COMPILER
from pd_connector.config import Config
from pd_connector.kv.coding import RAW
from pd_connector.pool.advertised import AdvertisedEngine
from pd_connector.pool.ask import PoolAsk, read_ask
from pd_connector.pool.codecs import pool_codecs
from pd_connector.pool.host import open_pool
from pd_connector.pool.keys import CHUNK_TOKENS, model_root
from pd_connector.pool.loader import Loader
from pd_connector.pool.record import Writer
from pd_connector.pool.trust import WriterTrust
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
from pd_connector.sglang.pool_chunks import HeldChunks
from pd_connector.sglang.pool_prompts import PoolPrompts
from pd_connector.sglang.pool_settings import check_model
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
    "lora_id",
    "session",
)
"""Attributes of a request whose token ids alone do not say what its KV is."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class PoolRank:
    """Used by the scheduler's thread.

    Attributes:
        loads: the rank's cache, for the thread that copies chunks into pages.
        prompts: that wait for chunks.
        thread: copies chunks out of pages.
        facts: the model, as far as it is known.

    Args:
        scheduler: SGLang's.
        pool: SGLang's pool of KV.
        ended: told of the end of each save and comparison.

    Raises:
        PDConnectorError: the engine is set up for what the pool cannot keep.
    """

    def __init__(
        self, scheduler: Any, pool: Any, config: Config, ended: Callable[[Outcome], None]
    ) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        check_model(scheduler, parallel)
        opened = open_pool(config.pool)
        assert opened is not None
        self._store, self._settings = opened
        shard = own_shard(pool, parallel.attn_tp_rank, parallel.attn_tp_size)
        caches = [
            describe_cache(pool, kv_heads(scheduler), shard, scales=kv_scales(scheduler))
            for _ in range(2)  # one for each thread that touches pages
        ]
        self.loads, saves = caches
        codecs = pool_codecs(config, consumes=False)
        if self.loads.on_host and any(codec != RAW.name for codec in codecs.readable):
            COMPILER.begin()
        ranks = EngineRanks(parallel, shard)
        self._engine_id = ranks.engine_id
        self._leads = parallel.attn_tp_rank == 0
        self.telemetry = Telemetry()
        loaded, files = loaded_weights(scheduler), loaded_files(scheduler)
        self.facts = model_facts(scheduler, config, shard, loaded, files)
        self._root: tuple[Any, bytes] = (None, b"")
        self._advertised = b""
        trust = WriterTrust(self._engine_id, audits=config.audit != "off")
        text = scheduler.model_config.hf_text_config
        self.thread = PoolThread(
            saves,
            self.telemetry,
            self.facts,
            self._store,
            trust,
            Writer(f"sglang {version('sglang')}", self._engine_id, codecs.passed),
            codecs,
            len(ranks.shards),
            ended,
            experts=any(getattr(text, name, 0) for name in _EXPERTS),
        )
        loader = Loader(self._store, self.loads.geometry, codecs.readable)
        self.prompts = PoolPrompts(
            self._store,
            lambda progressed: HeldChunks(loader, self.loads.geometry, progressed),
            trust,
            codecs.readable,
            self.telemetry,
            counts=self._leads,
        )
        self._stepped: tuple[float, int] = (0.0, 0)
        self.watch = SGLangWeights(scheduler, self.facts, loaded, files, self._submit, waits=False)
        self._changes = self.watch.changes
        self._metrics = (
            Metrics(self.telemetry, global_rank(parallel))
            if scheduler.server_args.enable_metrics
            else None
        )
        logger.info(
            "PDConnector's pool ready: engine %s, %s, reads %s, writes %s",
            *(self._engine_id, self.loads.geometry, self._settings.read, self._settings.write),
        )

    @property
    def model(self) -> bytes:
        """`keys.model_root` of the weights that compute now, and that computed all KV in SGLang's cache; empty: not known."""
        if self.watch.withdrawn:
            return b""
        facts = self.facts = self.watch.facts
        if self._root[0] is not facts:
            root = model_root(facts) or b""
            self._root = facts, root
            if root:
                logger.info("pool: in use")
        return self._root[1]

    def _submit(self, command: Command) -> None:
        """The weights change, or are known now. A thread that reads them can call it."""
        if isinstance(command, ChangeModel | KnowWeights):
            self.thread.submit(command)

    def stepped(self, tokens: int) -> None:
        """A step begins that computes these tokens of prompts; 0: none."""
        now = time.monotonic()
        began, before = self._stepped
        if before >= CHUNK_TOKENS:
            self.prompts.breakeven.computed(before, now - began)
        self._stepped = now, tokens
        if tokens:
            self.watch.step()
        if self.watch.changes != self._changes:
            self.forget()
        self.advertise()

    def forget(self) -> None:
        """The weights have changed, or will."""
        self._changes = self.watch.changes
        self.prompts.forget()

    def loaded(self, chunks: int, nbytes: int) -> None:
        """Chunks were copied into pages."""
        self.telemetry.count("pool_loaded_bytes", nbytes)
        if self._leads:
            self.telemetry.count("pool_hits", chunks)

    def advertise(self) -> None:
        """Let the engine's API server know what a router wants to know, if it has changed."""
        about = AdvertisedEngine(
            engine=self._engine_id,
            model=self.model.hex(),
            bytes_per_s=self.prompts.breakeven.bytes_per_s(),
        ).encode()
        if self._leads and about != self._advertised:
            self._advertised = about
            self._store.advertise(about)

    def ask(self, req: Any) -> PoolAsk:
        """What the client of a request wants of the pool. What cannot be followed is ignored, and logged once."""
        given = getattr(req.sampling_params, "custom_params", None)
        value = given.get("pool") if isinstance(given, dict) else None
        if value is None:
            return PoolAsk()
        try:
            return read_ask(value)
        except ValueError as error:
            logger.warning("request %s: %s; the pool is not used for it", req.rid, error)
            return PoolAsk(read=False, write=False)

    def takes(self, req: Any) -> bool:
        """Whether a request's tokens say what its KV is."""
        return not any(getattr(req, name, None) is not None for name in _BESIDE_TOKENS)

    def reads(self, req: Any) -> bool:
        """Whether chunks of the pool are used for a request. The same on all ranks."""
        return self._settings.read and self.takes(req) and self.ask(req).read

    def writes(self, req: Any) -> bool:
        """Whether its chunks are saved. The same on all ranks."""
        return self._settings.write and self.ask(req).write

    def tenant(self, req: Any) -> str:
        """Whose share of the pool its chunks take."""
        tenant = self.ask(req).tenant
        return tenant if tenant in self._settings.tenants else ""

    def close(self) -> None:
        """End the threads. The store stays open: it is the process's."""
        self.prompts.close()
        self.thread.close()
        self.watch.close()
        if self._metrics is not None:
            self._metrics.close()
