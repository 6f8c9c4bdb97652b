# SPDX-License-Identifier: Apache-2.0
"""KV connectors for the rig, as far as vLLM's scheduler asks them."""

from __future__ import annotations

from typing import Any

from sched_rig import Rig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request


class _Quiet:
    """What both sides answer alike."""

    requires_kv_delivery = False
    supports_divergent_local_hybrid_hits = False

    def on_new_request(self, request: Request) -> None: ...

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, tokens: int) -> None: ...

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return (0,)

    def build_connector_meta(self, output: Any) -> None: ...

    def update_connector_output(self, output: KVConnectorOutput) -> None: ...

    def request_finished(self, request: Request, blocks: list[int]) -> Any:
        return False, None

    def get_kv_connector_stats(self) -> None: ...

    def take_events(self) -> tuple[()]:
        return ()

    def has_pending_push_work(self) -> bool:
        return False

    def has_pending_block_frees(self) -> bool:
        return False


class Loads(_Quiet):
    """On a decode engine: KV of prompts comes when `arrive` says so; before `ready`, not yet."""

    def __init__(self, rig: Rig) -> None:
        self.ready = False
        self._rig = rig
        self._loading: dict[str, tuple[Request, list[int]]] = {}
        rig.scheduler.connector = self

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> Any:
        if not request.kv_transfer_params:
            return 0, False
        return (request.num_prompt_tokens - 1 - computed, True) if self.ready else (None, False)

    def update_state_after_alloc(self, request: Request, blocks: Any, tokens: int) -> None:
        if tokens:
            self._loading[request.request_id] = request, blocks.get_block_ids()[0]

    def arrive(self, name: str, *, failed: bool = False) -> KVConnectorOutput:
        """The KV of a request is here, or will not come: for the step's output."""
        request, blocks = self._loading.pop(name)
        request.kv_transfer_params = None
        if failed:
            return KVConnectorOutput(finished_recving={name}, failed_recving={name})
        self._rig.worker.load(request.prompt_token_ids, blocks, 0, request.num_prompt_tokens - 1)
        return KVConnectorOutput(finished_recving={name})


class Keeps(_Quiet):
    """On a prefill engine: blocks of requests that ended are kept until they are sent."""

    def __init__(self, rig: Rig) -> None:
        self.kept: set[str] = set()
        rig.scheduler.connector = self

    def request_finished(self, request: Request, blocks: list[int]) -> Any:
        self.kept.add(request.request_id)
        return True, {}

    def sent(self) -> KVConnectorOutput:
        """All that was kept has been sent: for the step's output."""
        names, self.kept = self.kept, set()
        return KVConnectorOutput(finished_sending=names)
