# SPDX-License-Identifier: Apache-2.0
"""One engine of two ranks with our scheduler and our decode kernels: every answer is the stock
engine's, although the second rank's clock runs three times as fast as the first one's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang_engines.sglang_harness import (
    EnginePool,
    SglangEngine,
    ask,
    assert_idle,
    assert_same,
    text,
)
from sglang_engines.sglang_recipes import Recipe, sglang_plugin

from pd_connector.tools.launch import wait_all

CHUNK_TOKENS = 128
SETTINGS = """
scheduler:
  qos_classes:
    - {name: premium, reserved_fraction: 0.5, priority: 100}
    - {name: free, reserved_fraction: 0.5, priority: 10}
request_router:
  routes:
    - {match: {header: "x-customer-tier: premium"}, qos: premium}
"""
SKEWED = """
import time

def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler.init_schedule_policy"
    HookRegistry.register(target, skew, HookType.BEFORE)

def skew(scheduler):
    if scheduler.tp_group.rank_in_group == 1:
        for name in ("monotonic", "perf_counter"):
            real = getattr(time, name)
            setattr(time, name, lambda real=real: 1e6 + 3 * real())
        print("this rank's clock is skewed", flush=True)
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    folder = tmp_path_factory.mktemp("ordered")
    settings = folder / "scheduler.yaml"
    settings.write_text(SETTINGS)
    recipe = Recipe(
        None,
        16,
        tp=2,
        args=(
            *("--schedule-policy", "pd_scheduler"),
            *("--decode-attention-backend", "pd_kernels"),
            *("--chunked-prefill-size", str(CHUNK_TOKENS)),
        ),
        env=(
            ("PD_SCHEDULER_CONFIG", str(settings)),
            ("PYTHONPATH", sglang_plugin(folder / "site", "skewed_clock", SKEWED)),
        ),
    )
    with recipe.engine("ordered", folder / "engine.log") as started:
        wait_all([started])
        yield started


def test_ranks_with_skewed_clocks_serve_a_burst_as_the_stock_engine_does(
    engines: EnginePool, engine: SglangEngine
) -> None:
    shared = text(200, seed=1)
    prompts = [text(5 + 47 * n, seed=n) for n in range(10)]
    prompts += [[*shared, *text(20 + n, seed=50 + n)] for n in range(6)]
    wanted = engines.reference(prompts)
    for _ in range(2):  # the second time everything is cached
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda prompt: ask(engine, prompt), prompts))
        for one, answer in zip(found, wanted, strict=True):
            assert_same(one, answer)
    assert_idle(engine)
    log = engine.log_path.read_text()
    assert "this rank's clock is skewed" in log
    assert "waiting requests are ordered by the policy SrjfCalibrated" in log
    assert "decode_backend=pd_kernels" in log
