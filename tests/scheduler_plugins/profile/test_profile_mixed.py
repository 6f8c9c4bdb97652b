# SPDX-License-Identifier: Apache-2.0
"""Steps with both prompt tokens and decoding sequences: timed from outside, fitted, and in the profile that a plan reads."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pd_connector.tools.launch.client import Samples
from scheduler_plugins.cost.engine_profile import EngineProfile, Errors
from scheduler_plugins.cost.model import CostModel, MixedCosts, StepLoad
from scheduler_plugins.cost.profile import (
    Measurement,
    ProfileError,
    fitted,
    load,
    loads,
    mixed_loads,
    save,
)
from scheduler_plugins.profile.client import Timed, connect
from scheduler_plugins.profile.facts import facts, started_s
from scheduler_plugins.profile.measure import Wanted, mixed_step, time_steps
from scheduler_plugins.sim.fleet import read
from scheduler_plugins.sim.mock.server import MockEngine
from scheduler_plugins.sim.mock.settings import MockSettings

MIXED = MixedCosts(m0=0.02, m1=0.004, m2=1e-7)
TRUTH = CostModel(a=8e-5, b=8e-9, c=0.012, d0=0.012, d1=0.0024, d2=5e-8, mixed=MIXED)
DEMO = Path(__file__).parents[3] / "pd_connector/tools/demo/model"


def test_a_step_with_both_takes_its_own_time_and_the_sum_where_it_was_not_measured() -> None:
    both = StepLoad(500, 500**2, 8, 8000)
    assert TRUTH.step_s(both) == pytest.approx(
        500 * 8e-5 + 500**2 * 8e-9 + 0.02 + 8 * 0.004 + 8000 * 1e-7
    )
    plain = replace(TRUTH, mixed=None)
    assert plain.step_s(both) == pytest.approx(
        500 * 8e-5 + 500**2 * 8e-9 + 0.012 + 8 * 0.0024 + 8000 * 5e-8
    )
    for one in (StepLoad(500, 500**2, 0, 0), StepLoad(0, 0, 8, 8000)):
        assert TRUTH.step_s(one) == plain.step_s(one)
    assert (
        replace(TRUTH, mixed=MixedCosts(m1=-1.0)).problem == "m1 is -1.0, must be from 0 to 1e+09"
    )


def test_all_three_kinds_are_fitted_and_each_has_its_error() -> None:
    steps = [*loads(8192, 16, 32), *mixed_loads(8192, 32, 2048)]
    model, errors = fitted([Measurement(one, TRUTH.step_s(one)) for one in steps])
    assert model.mixed is not None
    for found, wanted in ((model, TRUTH), (model.mixed, MIXED)):
        names = "abc" if found is model else ("m0", "m1", "m2")
        for name in names:
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6)
    assert max(errors.prefill or 0, errors.decode or 0, errors.mixed or 0) < 1e-6
    wrong = [
        Measurement(one, TRUTH.step_s(one) * (1 + (one.batch > 0 < one.tokens) * (n % 3)))
        for n, one in enumerate(steps)
    ]
    _, errors = fitted(wrong)
    assert (errors.mixed or 0) > 0.2 > 0.05 > (errors.decode or 0), "an error is of its kind"
    model, errors = fitted([it for it in wrong if not (it.load.batch and it.load.tokens)])
    assert model.mixed is None
    assert errors.mixed is None


def test_no_prompt_of_a_mixed_step_is_longer_than_the_step() -> None:
    for one in mixed_loads(8192, 32, 512):
        assert one.tokens + one.batch <= 512
    assert mixed_loads(8192, 32, 1) == []


def timed(*token_s: float, sent_s: float = 0.0) -> Timed:
    return Timed(200, sent_s, token_s, token_s[-1], 5, None, 0, "")


def test_the_step_is_the_one_whose_tokens_came_with_the_prompts_first() -> None:
    prompt = timed(0.351, sent_s=0.26)
    streams = [timed(0.1, 0.2, 0.27, 0.35, 0.42), timed(0.1, 0.2, 0.2, 0.27, 0.36, 0.43)]
    found, duration_s = mixed_step(64, prompt, streams, 100)
    assert found == StepLoad(64, 64**2, 2, 200 + 3 + 4)
    assert duration_s == pytest.approx(0.085)
    ended = timed(0.1, 0.2, 0.27, 0.35)
    assert mixed_step(64, prompt, [ended], 100)[0] is None, "the stream had ended"
    late = timed(0.3, 0.35, 0.42)
    assert mixed_step(64, prompt, [late], 100)[0] is None, "its own prompt ran at first"


async def steps_of(costs: CostModel, chunk_tokens: int):
    engine = MockEngine(MockSettings(costs=costs))
    await engine.start()
    try:
        async with connect(f"http://127.0.0.1:{engine.port}") as client:
            wanted = Wanted(400, 4, 1, chunk_tokens)
            return await time_steps(
                client, wanted, lambda *_: None, only=lambda one: one.batch > 0 < one.tokens
            )
    finally:
        await engine.close()


@pytest.mark.quiet
def test_steps_of_an_engine_are_timed_from_outside() -> None:
    """Bounds are wide because a busy machine sleeps longer than it is told to."""
    truth = replace(TRUTH, chunk_tokens=512)
    steps = asyncio.run(steps_of(truth, 512))
    assert len(steps.measured) >= 0.7 * len(mixed_loads(400, 4, 512))
    off = sorted(it.duration_s / truth.step_s(it.load) for it in steps.measured)
    assert off[len(off) // 2] == pytest.approx(1, abs=0.2)
    summed = replace(truth, mixed=None)
    slower = sorted(it.duration_s / summed.step_s(it.load) for it in steps.measured)
    assert slower[len(slower) // 2] > 1.15, "the sum would not do"


@pytest.mark.quiet
def test_a_prompt_that_the_engine_cuts_is_left_out() -> None:
    steps = asyncio.run(steps_of(replace(TRUTH, chunk_tokens=64), 0))
    assert any("give the engine's --max-num-batched-tokens" in why for why in steps.left_out)
    assert all(it.load.tokens <= 100 for it in steps.measured)


METRICS = """
process_start_time_seconds 1000.5
vllm:num_preemptions_total{engine="0"} 0
vllm:num_preemptions_created{engine="0"} 1031.25
vllm:request_success_created{engine="0"} 1031.5
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000"} 1.0
"""


def test_the_profile_has_what_a_plan_needs_and_is_read_as_it_is(tmp_path: Path) -> None:
    samples = Samples.parse(METRICS)
    errors = Errors(prefill=0.02, decode=0.03, mixed=0.05)
    known = facts(TRUTH, errors, samples, model=str(DEMO), gpus=2, start_s=None)
    assert not known.unknown
    save(tmp_path / "profile.json", known.profile)
    found, _ = read(tmp_path / "profile.json", EngineProfile)
    assert found == known.profile
    assert found.source == "measured"
    assert (found.kv_tokens, found.gpus, found.start_s) == (16_000, 2, 30.8)
    assert (found.layers, found.kv_bytes_per_token) == (4, 4 * 2 * 4 * 64 * 2)
    assert load(tmp_path / "profile.json") == TRUTH, "the scheduler reads the same file"
    text = json.loads((tmp_path / "profile.json").read_text())
    assert text["costs"]["mixed"] == {"m0": 0.02, "m1": 0.004, "m2": 1e-7}
    half = Samples.parse(METRICS.replace('dtype="auto"', 'dtype="fp8_e4m3"'))
    small = facts(TRUTH, errors, half, model=str(DEMO), gpus=2, start_s=3.0).profile
    assert small.kv_bytes_per_token == found.kv_bytes_per_token / 2
    assert small.start_s == 3.0


def test_what_is_not_known_is_said_with_what_to_do() -> None:
    known = facts(TRUTH, Errors(), Samples.parse(""), model="org/name", gpus=1, start_s=None)
    assert [why.partition(":")[0] for why in known.unknown] == [
        "kv_tokens",
        "model, dtype, layers and kv_bytes_per_token",
        "start_s",
    ]
    assert "--model" in known.unknown[1]
    assert "--start-s" in known.unknown[2]
    assert started_s(Samples.parse(METRICS.replace("1000.5", "2000"))) is None


def test_a_damaged_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(path, TRUTH)
    path.write_text(path.read_text().replace('"m0": 0.02', '"m0": -0.02'))
    with pytest.raises(ProfileError, match=r"m0 is -0\.02"):
        load(path)
