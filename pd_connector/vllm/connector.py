# SPDX-License-Identifier: Apache-2.0
"""`PDConnector`, as vLLM sees it. Thin: every hook belongs to one of two objects.

Scheduler side (`scheduler_side.SchedulerSide`): on_new_request, get_num_new_matched_tokens,
update_state_after_alloc, build_connector_meta, update_connector_output, request_finished.
Worker side (`worker_side.WorkerSide`): register_kv_caches, get_handshake_metadata,
bind_connector_metadata, get_transfer_results, get_kv_connector_stats, shutdown.

vLLM 0.31 to 0.33 call these hooks alike; hooks that only some of them have are harmless to others.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.vllm.messages import RankAddress, StepCommands, WorkerActivity
from pd_connector.vllm.metrics import PDPromMetrics, PDStats
from pd_connector.vllm.plugin import join_engine_log
from pd_connector.vllm.scheduler_side import SchedulerSide
from pd_connector.vllm.worker_side import WorkerSide

try:  # 0.32 and later tell by which road cached tokens came
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PDConnector(KVConnectorBase_V1):
    """Made once in the scheduler and once in each worker; holds the side of its role only."""

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
        config = Config.load(transfer.kv_connector_extra_config)
        _check_supported(vllm_config, kv_cache_config)
        # vLLM's own default is "fail" and cannot be told from a choice, so ours decides.
        # The scheduler reads the policy after it has made its connector.
        transfer.kv_load_failure_policy = config.on_failure
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                engine_id=transfer.engine_id,
                page_size=vllm_config.cache_config.block_size,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
            )
        else:
            self._worker = WorkerSide(vllm_config, config)

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for address in metadata.values():
            assert self._scheduler is not None
            assert isinstance(address, RankAddress)
            self._scheduler.set_address(address.host, address.port)

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
        return StepCommands(self._scheduler.take_commands())

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self._scheduler is not None
        for request_id in connector_output.finished_recving or ():
            self._scheduler.load_ended(request_id)
        activity = connector_output.kv_connector_worker_meta
        if isinstance(activity, WorkerActivity):
            self._scheduler.worker_reported(activity.slots)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return self._scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.pending_work

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self._worker is not None
        return self._worker.address()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called before the forward pass of every step, so that transfers run beside it."""
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None
        assert isinstance(connector_metadata, StepCommands)
        self._worker.obey(connector_metadata.commands)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        sent, received, failed = self._worker.outcomes()
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

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
        """Pages are gathered after the request has finished, not as layers are computed."""

    def wait_for_save(self) -> None:
        """Nothing is saved during a step."""

    # Both sides

    def get_kv_connector_stats(self) -> PDStats | None:
        if self._worker is not None:
            return self._worker.stats()
        assert self._scheduler is not None
        return PDStats.of(self._scheduler.telemetry, "scheduler")

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Asked by 0.33: no, for an engine that sleeps frees pages that may be on their way."""
        return False

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

    def reset_cache(self) -> bool:
        """Nothing is cached between requests."""
        return True


def _check_supported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ConfigError(
                f"{name} {getattr(parallel, name)}: this version of PDConnector moves KV between "
                "engines of one rank; start the engine with 1"
            )
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ConfigError(
            f"{groups} KV cache groups: this version of PDConnector moves one; start the engine "
            "with --disable-hybrid-kv-cache-manager"
        )
