# SPDX-License-Identifier: Apache-2.0
"""`PDConnector`, as vLLM sees it. Thin: every hook belongs to one of two objects.

Scheduler side (`scheduler_side.SchedulerSide`): on_new_request, get_num_new_matched_tokens,
update_state_after_alloc, build_connector_meta, update_connector_output,
request_finished_all_groups.
Worker side (`worker_side.WorkerSide`): register_kv_caches, unregister_kv_caches, restore_kv_caches, get_handshake_metadata,
handle_preemptions, bind_connector_metadata, save_kv_layer, wait_for_save, get_transfer_results,
get_kv_connector_stats, shutdown.

vLLM 0.31 to 0.33 call these hooks in the same way. Versions that do not know a hook do not call it.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from pd_connector.pool.store.base import DISK, FAR, MEMORY
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.versions import advice
from pd_connector.vllm.engine_facts import EngineFacts
from pd_connector.vllm.extension import Operated
from pd_connector.vllm.identity.adapter_watch import watch
from pd_connector.vllm.identity.weight_loads import watch_calls
from pd_connector.vllm.messages import RankAddress, StepCommands, WorkerActivity
from pd_connector.vllm.metrics import PDPromMetrics, PDStats
from pd_connector.vllm.plugin import join_engine_log
from pd_connector.vllm.pool.attached import attach
from pd_connector.vllm.scheduler_side import SchedulerSide
from pd_connector.vllm.shards import in_order
from pd_connector.vllm.support import check_prefixes, check_supported, load_config
from pd_connector.vllm.worker_side import WorkerSide

try:  # 0.32 and later count cached tokens by source
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None

_SOURCES = (
    {
        MEMORY: CacheHitSource.HOST,
        DISK: CacheHitSource.DISK,
        FAR: CacheHitSource.EXTERNAL_UNSPECIFIED,
    }
    if CacheHitSource
    else {}
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("pd_connector.vllm")


class PDConnector(KVConnectorBase_V1, SupportsHMA, Operated):
    """Made once in the scheduler and once in each worker; has only the side of its role."""

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_engine_log()
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        assert transfer.engine_id is not None
        config = load_config(transfer.kv_connector_extra_config)
        check_supported(vllm_config)
        check_prefixes(config, vllm_config, kv_cache_config)
        # vLLM's own default is "fail" and cannot be told from a choice, so our config decides.
        # The scheduler reads the policy after it has made its connector.
        transfer.kv_load_failure_policy = config.on_failure
        self._engine_id = transfer.engine_id
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            if what := advice(vllm.__version__):
                logger.warning("vLLM %s: %s", vllm.__version__, what)
            self._scheduler = SchedulerSide(config, EngineFacts.of(vllm_config, kv_cache_config))
            watch_calls(self._scheduler)
            if self._scheduler.pool is not None:
                attach(self._scheduler.pool, vllm_config)
            if vllm_config.lora_config is not None:
                watch(self._scheduler.identity.adapters)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, config)

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        assert self._scheduler is not None
        assert self._engine_id is not None
        addresses = [address for address in metadata.values() if isinstance(address, RankAddress)]
        assert len(addresses) == len(metadata)
        ranks = {rank.shard: rank for address in addresses for rank in (address, *address.copies)}
        peers = in_order(
            Peer(Source(rank.host, rank.port, self._engine_id), shard)
            for shard, rank in ranks.items()
        )
        ports = {rank.data_port for rank in ranks.values()}
        model = ranks[peers[0].shard].model if peers else None
        self._scheduler.set_peers(peers, tuple(ports - {0}), model)

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        assert self._scheduler is not None
        self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.take_step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self._scheduler is not None
        activity = connector_output.kv_connector_worker_meta
        if isinstance(activity, WorkerActivity):
            self._scheduler.loads_broke_off(activity.cuts)
        for request_id in connector_output.finished_sending or ():
            self._scheduler.offers.sent(request_id)
        failed = connector_output.failed_recving or ()
        for request_id in connector_output.finished_recving or ():
            self._scheduler.load_ended(request_id, failed=request_id in failed)
        if isinstance(activity, WorkerActivity):
            self._scheduler.workers_reported(activity)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.request_finished(request, block_ids)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called within a MultiConnector if another of its parts supports only one page table."""
        return self.request_finished_all_groups(request, (block_ids,))

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Called by 0.32 and later: loads fill pages of these groups."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict["CacheHitSource", int]:
        """Called by 0.32 and later after pages were allocated: KV comes from the host's pool, or from another engine."""
        assert self._scheduler is not None
        tiers = self._scheduler.pool.tiers(request.request_id) if self._scheduler.pool else {}
        sources = {_SOURCES[tier]: tokens for tier, tokens in tiers.items()}
        if sum(sources.values()) == num_external_tokens:
            return sources
        return {self._cache_hit_source: num_external_tokens}

    def take_events(self) -> Iterable["KVCacheEvent"]:
        """Called with every step: which blocks have come into the host's pool, or have gone."""
        assert self._scheduler is not None
        return self._scheduler.pool.take_events() if self._scheduler.pool else ()

    def has_pending_block_frees(self) -> bool:
        """Called when vLLM has no free pages. Returns whether pages of ended requests come free soon."""
        assert self._scheduler is not None
        return self._scheduler.saving

    def has_pending_push_work(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.pending_work

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Called by 0.33 and later before the engine sleeps. Transfers have ended by then, except those of requests
        that were paused with their pages (`mode=keep`)."""
        assert self._worker is not None
        self._worker.sleep()

    def restore_kv_caches(self) -> None:
        """Called by 0.33 and later once the pages have memory again; the weights may still have none."""
        assert self._worker is not None
        self._worker.wake()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._worker is not None
        return self._worker.address()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called with every step, usually before pages of preempted requests are overwritten
        (`runner.revokes_late`)."""
        assert self._worker is not None
        assert isinstance(kv_connector_metadata, StepCommands)
        self._worker.take_back(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called before the forward pass of every step, so that transfers run during it."""
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None
        assert isinstance(connector_metadata, StepCommands)
        self._worker.begin(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        sent, received, failed = self._worker.outcomes()
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Called with every step, after the results: pages that loads have left unfilled."""
        assert self._worker is not None
        return self._worker.fills.take_invalid_pages()

    def build_connector_worker_meta(self) -> WorkerActivity | None:
        assert self._worker is not None
        return self._worker.activity()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Loads were started when the step's metadata was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before their request is scheduled; no layer has to wait."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Called after a layer's KV was computed: its KV may be sent."""
        assert self._worker is not None
        self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Called after the step has computed everything; waits for nothing."""
        assert self._worker is not None
        self._worker.end()

    def set_weights_version(self, version: str) -> None:
        """Called by `extension.WorkerExtension`: the weights have changed, to this version."""
        assert self._worker is not None
        self._worker.change_version(version)

    def outgoing_transfers(self) -> int:
        """Called by `extension.WorkerExtension`: transfers that consumers have yet to fetch."""
        assert self._worker is not None
        return self._worker.outgoing_transfers

    # Both sides

    def get_kv_connector_stats(self) -> PDStats | None:
        if self._worker is not None:
            return self._worker.stats()
        assert self._scheduler is not None
        return self._scheduler.stats()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs would skip `save_kv_layer`."""
        return load_config(extra_config).overlap == "layer"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Called by 0.33 and later, which call `unregister_kv_caches` before the pages go."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PDStats:
        return PDStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PDPromMetrics:
        return PDPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def reset_cache(self) -> bool:
        """Called by `/reset_prefix_cache?reset_external=true`, and when vLLM pauses, mostly for new weights. From then
        on this engine uses none of the pool's present KV. No other part keeps KV between requests."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True
