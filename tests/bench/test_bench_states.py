# SPDX-License-Identifier: Apache-2.0
"""`bench states`: its rows, its exit codes, and the parts that need no engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.bench import comparison
from typer import Typer
from typer.testing import CliRunner

from pd_bench.report import BenchError
from pd_bench.states import command, rows, step_probe
from pd_bench.states.model import STATE_BYTES, TOKEN_BYTES, wanted_bytes
from pd_bench.states.rows import Row

REACHED, MISSED = comparison(9.0, 10.0), comparison(11.0, 10.0)


@pytest.fixture
def invoke(monkeypatch):
    """Runs the command; `found` is each row's comparison, or the error of a measurement."""
    asked: list[object] = []

    def run(found, *arguments: str):
        def measured(*given):
            asked.append(given[0])
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(command, "_check_possible", lambda wanted: None)
        monkeypatch.setattr(command, "over_link", lambda *given: ([("x", [measured(*given)])], []))
        monkeypatch.setattr(command, "drafts", measured)
        app = Typer()
        app.command()(command.states)
        return CliRunner().invoke(app, arguments)

    run.asked = asked
    return run


def test_rows_that_share_pairs_are_measured_together(invoke):
    result = invoke(REACHED, "--row", "bytes", "--row", "drafts", "--row", "step", "--row", "bytes")
    assert result.exit_code == 0, result.output
    assert invoke.asked[0] == [Row.BYTES, Row.STEP]
    assert len(invoke.asked) == 2


def test_the_exit_code_tells_a_missed_bar_from_no_measurement(invoke):
    assert invoke(MISSED, "--row", "link").exit_code == 1
    assert invoke(BenchError("nothing came"), "--row", "drafts").exit_code == 2


def test_without_namespaces_rows_without_a_link_are_named(monkeypatch):
    monkeypatch.setattr(command, "available", lambda: "no ip")
    monkeypatch.setattr(command, "require", lambda *modules: None)
    command._check_possible([Row.DRAFTS, Row.STRIPES])
    with pytest.raises(BenchError, match=r"no ip.*stripes, drafts"):
        command._check_possible([Row.BYTES])


def test_one_token_less_is_wanted_than_the_prompt_has():
    assert wanted_bytes(1) == STATE_BYTES
    assert wanted_bytes(11) - wanted_bytes(10) == TOKEN_BYTES


class FakePair:
    """A decode engine whose steps followed the states of requests by these delays."""

    def __init__(self, delays_s: list[float]) -> None:
        self.delays_s, self.frozen, self.requests = delays_s, False, 0
        self.engines = (SimpleNamespace(client=self), SimpleNamespace(client=self))

    def model(self) -> str:
        return "fake"

    def post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        return {"tokens": [1, 2]} if path == "/tokenize" else {"results": [self.delays_s]}

    def run(self, prompt: object, salt: str) -> None:
        assert not self.frozen
        self.requests += 1

    def pause(self) -> None:
        self.frozen = True

    def resume(self) -> None:
        self.frozen = False


def test_one_slow_step_of_a_hundred_is_not_the_99th_percentile_and_two_are():
    other = FakePair([])
    for slow, ok in ((1, True), (2, False)):
        pair = FakePair([0.5] * slow + [0.001] * (rows.STEP_RUNS - slow))
        _, judged = rows._steps(pair, [other])
        assert judged.ok == ok
        assert pair.requests == rows.STEP_RUNS + 1
    assert not other.frozen
    with pytest.raises(BenchError, match="99 of 100"):
        rows._steps(FakePair([0.001] * 99), [other])


def test_the_probe_measures_from_the_last_landing_to_the_next_step_with_tokens(monkeypatch):
    from pd_connector.agent.consuming import receive_pipeline

    now = [0.0]
    pipelines = SimpleNamespace(place_states=lambda pipeline, request: None)
    receivers = SimpleNamespace(
        landed=lambda receiver, *given: pipelines.place_states(None, "r") if given[0] else None
    )
    monkeypatch.setattr(receive_pipeline, "ChunkReceiver", receivers)
    monkeypatch.setattr(receive_pipeline, "ReceivePipeline", pipelines)
    monkeypatch.setattr(step_probe, "_delays_s", [])
    monkeypatch.setattr(step_probe, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    worker = step_probe.StepProbe()
    worker.model_runner = SimpleNamespace(execute_model=lambda scheduled: scheduled)
    worker.watch_steps()

    def at(seconds: float, tokens: int | None = None, *, last: bool = False) -> None:
        now[0] = seconds
        if tokens is None:
            receivers.landed(None, last, 0.0)
        else:
            step = SimpleNamespace(total_num_scheduled_tokens=tokens)
            assert worker.model_runner.execute_model(step) is step

    at(1.0, 5)  # another request
    at(2.0)  # KV
    at(3.0, last=True)
    at(3.5, 0)
    at(4.0, 1)
    at(5.0, 1)
    assert worker.step_delays() == [1.0]


def test_ranks_that_share_tokens_hand_over_every_element(monkeypatch):
    """Real agents."""
    pytest.importorskip("vllm.v1.kv_cache_interface")
    from pd_bench.states import stripes

    monkeypatch.setattr(stripes, "TOKENS", 1024)
    found = stripes.measure(1, 0)
    assert (found.name, found.bar) == ("interleave of a token", stripes.BAR)
    values = stripes._values
    monkeypatch.setattr(stripes, "_values", lambda layer, tokens: values(layer, tokens.roll(1)))
    with pytest.raises(BenchError, match="arrived wrong"):
        stripes.measure(1, 0)
