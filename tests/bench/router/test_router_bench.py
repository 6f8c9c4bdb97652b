# SPDX-License-Identifier: Apache-2.0
"""`bench router`: the trace made smaller, a short run of each measurement, and what is said of peers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.waits import until
from typer.testing import CliRunner

from pd_bench.router import mocks, overload, rotations, scaled, truth, two
from pd_bench.router.command import app
from pd_bench.router.contenders import OURS, SGLANG, VLLM, Ours
from pd_bench.router.mocks import MockProcess
from pd_bench.router.rotations import Measured, Window
from pd_bench.router.sending import Outcome, play
from pd_connector.tools.launch import Port
from scheduler_plugins.router.settings.settings_file import parse
from scheduler_plugins.sim.mock.server import text_ids


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """60 requests in Mooncake's form, 20 a second, which begin alike."""
    path = tmp_path / "trace.jsonl"
    lines = (
        {
            "timestamp": 50 * n,
            "input_length": 2048 + 64 * n,
            "output_length": 32,
            "hash_ids": [0, 1, 2 + n % 3, 100 + n, 200 + n, 300 + n, 400 + n, 500 + n],
        }
        for n in range(60)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_small_prompt_takes_as_long_as_the_whole_one(trace: Path) -> None:
    whole, small = scaled.whole_costs(), scaled.costs()
    for tokens, cached in ((512, 0), (4096, 1024), (65536, 0)):
        taken_s = small.prefill_s(tokens // scaled.SCALE, cached // scaled.SCALE)
        assert taken_s == pytest.approx(whole.prefill_s(tokens, cached))
    assert small.decode_step_s(8, 16_000 // scaled.SCALE) == pytest.approx(
        whole.decode_step_s(8, 16_000)
    )
    assert scaled.costs(10.0).prefill_s(512) == pytest.approx(small.prefill_s(512) / 10)


def test_equal_blocks_are_equal_text(trace: Path) -> None:
    recorded = scaled.read(trace, 10)
    sent = scaled.sent(recorded)
    for one, request in zip(sent, recorded, strict=True):
        assert one.tokens == request.tokens // scaled.SCALE == len(text_ids(one.prompt.encode()))
    begins = {one.prompt[: 2 * 4 * scaled.BLOCK_TOKENS] for one in sent}
    assert len(begins) == 1
    assert len({one.prompt for one in sent}) == len(sent)


def test_twice_the_rate_is_half_the_time(trace: Path) -> None:
    assert scaled.read(trace, 60, rate=2.0)[-1].arrival_s == pytest.approx(
        scaled.read(trace, 60)[-1].arrival_s / 2
    )


def test_a_short_live_run_serves_everything_and_finds_what_was_cached(trace: Path) -> None:
    recorded = scaled.read(trace, 40)
    window = Window(0, len(recorded))
    ours = Ours(OURS, prefill=1, decode=1)
    said: list[str] = []
    run = rotations.measure(ours, scaled.sent(recorded), [window], 1.0, said.append)
    assert said == [f"{OURS}: {sent} of 40 requests sent" for sent in range(4, 40, 4)]
    assert [one.tokens for one in run.outcomes] == [one.max_tokens for one in recorded]
    assert all(one.ttft_s > 0 for one in run.outcomes)
    assert run.hits[window] > 0.1


def test_our_router_with_plain_settings_uses_all_decode_engines(trace: Path) -> None:
    """It is told nothing of their costs, as beside its peers. A profile hid that one engine got all."""
    plain = Ours(OURS, prefill=1, decode=3, profiled=False)
    with rotations.cluster([plain], 1.0) as running:
        assert "--profile" not in running.router.command()
        requests = scaled.sent(scaled.read(trace, 40))
        found = asyncio.run(play([running.router.base_url], requests, 1.0))
        assert all(one.served for one in found)
        generated = [mocks.prefix_hits([engine]).queries for engine in running.decode]
    assert min(generated) > 0.1 * sum(generated)


def test_promises_are_settings_that_the_router_takes() -> None:
    def mocks(side: str) -> list[MockProcess]:
        return [MockProcess(side, Path("costs.json"), 5.0, Path("log"))]

    for promises, ttft_ms in ((True, overload.TTFT_S * 200), (False, None)):
        promising = overload.Promising("", promises=promises, speed=5.0)
        text = json.dumps(promising.settings(mocks("p"), mocks("d")))
        config = parse(text.encode(), {}, "router.yaml")
        assert config.classes[0].slo.ttft_ms == ttft_ms
        assert len(config.prefill) == len(config.decode) == 1
        assert len(config.kv_events) == 2


def test_two_routers_are_compared_that_hear_each_other() -> None:
    with Port() as one_port, Port() as other_port:
        ours = Ours(OURS, prefill=1, decode=1)
        with rotations.cluster(two.in_touch(ours, [one_port, other_port]), 1.0) as running:
            fronts = running.routers
            until(
                lambda: all(one.metrics().total("pd_router:fellows") == 1 for one in fronts),
                "each router to hear the other",
                60,
            )
    assert two.in_touch(ours, []) == [ours]


def outcomes(ttft_s: float) -> list[Outcome]:
    return [Outcome(200, ttft_s, ttft_s, 1)] * 10


def test_the_bar_holds_against_the_best_peer() -> None:
    window = Window(0, 10, 0.9, 0.9)

    def run(ttft_s: float) -> Measured:
        return Measured(outcomes(ttft_s), {window: 0.3})

    results = {OURS: [run(0.95)], VLLM: [run(1.0)], SGLANG: [run(2.0)]}
    tables = dict(rotations.compared(results, [window]))
    mean = {who: rows[0] for who, rows in tables.items()}
    assert mean[VLLM].bar == 0.9
    assert not mean[VLLM].ok
    assert mean[SGLANG].bar is None


def test_the_simulator_is_judged_in_both_directions() -> None:
    live = truth.Seen(1.0, 0.30)
    for ttft_s, hit, ok in ((1.1, 0.31, True), (0.8, 0.3, False), (1.2, 0.3, False)):
        assert truth.compared("all", live, truth.Seen(ttft_s, hit))[0].ok is ok
    assert not truth.compared("all", live, truth.Seen(1.0, 0.27))[1].ok


def test_the_simulator_tells_windows_apart(trace: Path) -> None:
    recorded = scaled.read(trace, 60)
    early, late = truth.simulated(recorded, "conductor", [range(5), range(30, 60)])
    assert 0 < early.hit < late.hit < 1
    assert late.ttft_s > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name --vllm-env, --sglang-env, or both"),
        (["--vllm-env", "/nothing"], "vllm-router==0.1.17"),
        (["--sglang-env", "/nothing"], "sglang-router==0.3.2"),
    ],
)
def test_without_a_peer_the_command_says_how_to_get_one(
    trace: Path, arguments: list[str], words: str
) -> None:
    result = CliRunner().invoke(app, ["peers", str(trace), *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
