# SPDX-License-Identifier: Apache-2.0
"""A vLLM scheduler without an engine, for the model of `pd-connector demo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from pd_connector.tools.demo import MODEL_DIR

PAGE_SIZE = 16


def config_of(
    *,
    budget: int,
    seqs: int,
    max_model_len: int,
    caching: bool = True,
    async_scheduling: bool = False,
    policy: str = "fcfs",
    additional: dict[str, Any] | None = None,
) -> VllmConfig:
    """A configuration like the one that vLLM's server makes.

    Args:
        budget: tokens in a step.
        additional: `--additional-config`.
    """
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(MODEL_DIR), dtype="float32", max_model_len=max_model_len, seed=0
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=async_scheduling,
            policy=policy,
            watermark=0.0,
        ),
        cache_config=CacheConfig(block_size=PAGE_SIZE, enable_prefix_caching=caching),
        device_config=DeviceConfig("cpu"),
        additional_config=additional or {},
    )
    config.scheduler_config.async_scheduling = async_scheduling
    return config


def scheduler_of(
    scheduler: Callable[..., Scheduler],
    config: VllmConfig,
    grammars: Any,
    *,
    blocks: int,
    specs: Sequence[Any] = (),
) -> Scheduler:
    """A scheduler with its own KV cache.

    Args:
        scheduler: its class.
        grammars: a manager of structured outputs.
        blocks: blocks of the KV cache, vLLM's null block included.
        specs: specs of the cache's groups; by default one group with full attention.
    """
    whole = FullAttentionSpec(
        block_size=PAGE_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    config.cache_config.num_gpu_blocks = blocks
    return scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs or [whole])
            ],
        ),
        structured_output_manager=grammars,
        block_size=max([PAGE_SIZE, *(int(spec.block_size) for spec in specs)]),
        log_stats=True,
    )
