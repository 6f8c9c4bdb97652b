# SPDX-License-Identifier: Apache-2.0
"""The facts of an engine's profile other than its costs, from `/metrics` and the model's config."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import NamedTuple

import msgspec

from pd_connector.tools.launch.client import Samples
from scheduler_plugins.cost.engine_profile import EngineProfile, Errors
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.planner.errors import PlanError
from scheduler_plugins.planner.estimate import Model, read_model

_ONE_BYTE = "fp8"
"""KV dtypes whose names begin so have one byte a value."""


class Facts(NamedTuple):
    """An engine, and why something of it is not known."""

    profile: EngineProfile
    unknown: list[str]


def facts(
    costs: CostModel,
    errors: Errors,
    samples: Samples,
    *,
    model: str,
    gpus: int,
    start_s: float | None,
) -> Facts:
    """The profile of an engine that was measured.

    Args:
        samples: samples of its `/metrics`.
        model: folder of the model, or its `config.json`; a name without such a folder here is not read.
        gpus: number of the engine's GPUs.
        start_s: time from the start of the process until it serves; None: from `/metrics`.
    """
    unknown = list[str]()
    profile = EngineProfile(costs=costs, errors=errors, gpus=gpus, source="measured")
    config = dict(
        next((labels for name, labels in samples if name == "vllm:cache_config_info"), ())
    )
    block, blocks = config.get("block_size", ""), config.get("num_gpu_blocks", "")
    if block.isdecimal() and blocks.isdecimal():
        profile = msgspec.structs.replace(profile, kv_tokens=float(int(block) * int(blocks)))
    else:
        unknown.append("kv_tokens: /metrics has no num_gpu_blocks; write it from the engine's log")
    try:
        sizes = read_model(Path(model))
    except PlanError as error:
        unknown.append(f"model, dtype, layers and kv_bytes_per_token: {error} (--model)")
    else:
        profile = _with_model(profile, sizes, config.get("cache_dtype", ""))
    start_s = started_s(samples) if start_s is None else start_s
    if start_s is None:
        unknown.append("start_s: /metrics does not say; give --start-s, from the engine's log")
    else:
        profile = msgspec.structs.replace(profile, start_s=round(start_s, 1))
    return Facts(profile, unknown)


def _with_model(profile: EngineProfile, model: Model, cache_dtype: str) -> EngineProfile:
    """`cache_dtype`: the engine's `--kv-cache-dtype`."""
    size = model.kv_bytes_per_token
    if cache_dtype.startswith(_ONE_BYTE):
        size /= model.kv_value_bytes
    return msgspec.structs.replace(
        profile, kv_bytes_per_token=size, layers=model.layers, model=model.name, dtype=model.dtype
    )


def started_s(samples: Samples) -> float | None:
    """Seconds from the start of the server's process until its engine was ready; None: `/metrics` does not say.

    vLLM makes its counters when the engine is ready, and the client library notes when each was made.
    """
    begun_s = samples.total("process_start_time_seconds")
    made = [
        value
        for (name, _), value in samples.items()
        if name.startswith("vllm:") and name.endswith("_created")
    ]
    ready_s = min(made, default=0.0)
    return ready_s - begun_s if 0 < begun_s < ready_s < inf else None
