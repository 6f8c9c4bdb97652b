# SPDX-License-Identifier: Apache-2.0
"""PDConnector beside another connector within vLLM's MultiConnector, in an engine that computes. The other connector has
KV of every prompt that asks for it, and fills only the tokens that a window still sees, as a handoff may."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from pd_connector.vllm.plugin import register
from support.vllm_computing import ComputingEngine, kv_of, marks

KEY = "other_tokens"
"""In a request's `kv_transfer_params`: the tokens whose KV the other connector has."""
LATER = "other_later"
"""Whether it loads before the request is scheduled, in place of within its first step."""


class Load(NamedTuple):
    request: str
    tables: tuple[list[int], ...]
    tokens: list[int]
    first_token: int
    later: bool


@dataclass
class Loads(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """Its scheduler's side. Its worker's side is in `EngineBeside`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._found: dict[str, int] = {}
        self._loads: list[Load] = []

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        self._found[request.request_id] = num_computed_tokens
        return max(0, params.get(KEY, 0) - num_computed_tokens), bool(params.get(LATER))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self._found[request.request_id]
            tokens = list(request.all_token_ids[: first + num_external_tokens])
            later = bool(request.kv_transfer_params.get(LATER))
            tables = blocks.get_block_ids()
            self._loads.append(Load(request.request_id, tables, tokens, first, later))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        return Loads(loads)

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...
    def wait_for_layer_load(self, *_: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class EngineBeside(ComputingEngine):
    """An engine with both connectors; PDConnector is asked first."""

    def _transfer_config(self, config: Any, role: str, extra: dict[str, Any]) -> KVTransferConfig:
        register()
        if "OtherConnector" not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector("OtherConnector", __name__, "OtherConnector")
        ours = {
            "kv_connector": "PDConnector",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        }
        parts = [ours, {"kv_connector": "OtherConnector", "kv_role": "kv_both"}]
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=role,
            kv_connector_extra_config={"connectors": parts},
        )

    @property
    def side(self) -> Any:
        return self.scheduler.connector._connectors[0]._scheduler

    def run(self, output: SchedulerOutput) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        whole: Any = output.kv_connector_metadata
        output.kv_connector_metadata, others = whole.metadata
        self._filled = [load.request for load in others.loads if load.later]
        self._to_fill = others.loads
        return super().run(output)

    def _prepare(self, output: SchedulerOutput) -> None:
        super()._prepare(output)
        for load in self._to_fill:
            self._fill(load)

    def _fill(self, load: Load) -> None:
        for number, (table, pages) in self._layers.items():
            size, stop = self._specs[table].block_size, len(load.tokens)
            kept = getattr(self._specs[table], "sliding_window", 0) or 0
            first = max(load.first_token, stop - kept + 1 if kept else 0)
            places = torch.arange(first, stop)
            listed = torch.tensor(load.tables[table])[places // size], places % size
            pages[listed[0], 0, listed[1]] = kv_of(number, marks(load.tokens)[first:])

    def _result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = super()._result(output)
        told = result.kv_connector_output
        assert told is not None
        received = {*(told.finished_recving or ()), *self._filled}
        told.finished_recving = received or None
        if (activity := told.kv_connector_worker_meta) is not None:
            told.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata((activity, None))
        return result
