# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with the connector in it, both real, over workers that compute nothing: steps in vLLM's own order of
calls. What the connector tells its workers, and what pages requests have, can be looked at after every step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from pd_bench.scheduler.bare import PAGE_SIZE, config_of, scheduler_of
from pd_connector.agent.commands import Command
from pd_connector.vllm.messages import StepCommands, WorkerActivity

PAGE = PAGE_SIZE
FETCH = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "producer",
    "remote_host": "127.0.0.1",
    "remote_port": 7,
    "remote_block_ids": [[1]],
}
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
init_none_hash(sha256)
_hasher = get_request_block_hasher(PAGE, sha256)


class SteppedEngine:
    """An engine of one rank.

    Args:
        specs: of the groups of its cache; one with full attention by default.
        scheduler: its class.
        additional: vLLM's `additional_config`.
        blocks: of the cache.
        budget: tokens in a step.
        adapters: whether it is started with LoRA.
        ahead: the next step may be scheduled before the outcome of the last is known, as on a GPU.
        states: `mamba_cache_mode`, if a group has states.
        caching: whether it has a prefix cache.
        drafts: a method of speculative decoding, with a token more each step.
        dcp: ranks of decode context parallelism; without a prefix cache.
        extra: the connector's config.
    """

    def __init__(
        self,
        role: str = "kv_both",
        *,
        specs: Sequence[Any] = (),
        scheduler: type[Scheduler] = Scheduler,
        additional: dict[str, Any] | None = None,
        blocks: int = 200,
        budget: int = 64,
        adapters: bool = False,
        ahead: bool = False,
        states: Any = "none",
        caching: bool = True,
        drafts: Any = None,
        dcp: int = 1,
        **extra: Any,
    ) -> None:
        config = config_of(
            budget=budget,
            seqs=16,
            max_model_len=2048,
            caching=caching,
            async_scheduling=ahead,
            additional=additional,
        )
        config.cache_config.mamba_cache_mode = states
        config.parallel_config.decode_context_parallel_size = dcp
        if drafts:
            config.speculative_config = SpeculativeConfig(method="ngram", num_speculative_tokens=1)
            config.speculative_config.method = drafts  # no draft model is read
        if ahead and scheduler is Scheduler:
            scheduler = AsyncScheduler
        config.kv_transfer_config = self._transfer_config(config, role, extra)
        if adapters:
            config.lora_config = LoRAConfig(max_loras=2)
        accepts = SimpleNamespace(accept_tokens=lambda *_: True)
        self.scheduler = scheduler_of(scheduler, config, accepts, blocks=blocks, specs=specs)
        self.commands: list[Command] = []

    def _transfer_config(
        self, config: VllmConfig, role: str, extra: dict[str, Any]
    ) -> KVTransferConfig:
        """How the engine's connector is configured; `config` is the rest."""
        return KVTransferConfig(
            kv_connector="PDConnector",
            kv_connector_module_path="pd_connector.vllm.connector",
            kv_role=role,
            kv_connector_extra_config=extra,
        )

    @property
    def side(self) -> Any:
        return self.scheduler.connector._scheduler

    @property
    def store(self) -> Any:
        """The store of its pool."""
        return self.side.pool._store

    def add(
        self,
        name: str,
        tokens: int,
        max_tokens: int = 8,
        seed: int = 0,
        *,
        qos: str = "",
        lora: LoRARequest | None = None,
        salt: str | None = None,
        features: Sequence[Any] = (),
        **kv: Any,
    ) -> Request:
        """A request arrives; prompts of one seed begin alike. `features`: its images."""
        extra: dict[str, Any] = {"qos": qos} if qos else {}
        if kv:
            extra["kv_transfer_params"] = kv
        prompt = [(seed * 31 + place) % 250 for place in range(tokens)]
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None
            ),
            pooling_params=None,
            lora_request=lora,
            cache_salt=salt,
            mm_features=list(features),
            block_hasher=_hasher,
        )
        self.scheduler.add_request(request)
        return request

    def fetch(self, name: str, tokens: int, max_tokens: int = 8, **more: Any) -> Request:
        """A request arrives, and a producer has its KV."""
        seed = more.pop("seed", 0)
        params = {**FETCH, "remote_request_id": f"transfer of {name}", **more}
        return self.add(name, tokens, max_tokens, seed, **params)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, activity: WorkerActivity | None = None, **reported: Any) -> list[Command]:
        """One step. The workers report with its end; returns what they were told with its begin."""
        output = self.scheduler.schedule()
        told = output.kv_connector_metadata
        assert isinstance(told, StepCommands)
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([1] if done and count else [])
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        over = set(told.over) | set(reported.pop("finished_sending", ()))
        result.kv_connector_output = KVConnectorOutput(
            finished_sending=over or None, kv_connector_worker_meta=activity, **reported
        )
        self.scheduler.update_from_output(output, result)
        self.commands += told.commands
        return list(told.commands)

    def pages(self, name: str) -> tuple[list[int], ...]:
        """The pages that vLLM has for a request, by table; 0 for none."""
        return self.scheduler.kv_cache_manager.get_block_ids(name)

    def assert_nothing_held(self) -> None:
        """All requests have gone, and all pages are free."""
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
