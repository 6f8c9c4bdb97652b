# SPDX-License-Identifier: Apache-2.0
"""Benchmarks without engines: statistics, reports, the order of runs, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pd_connector.bench import handoff as handoff_module
from pd_connector.bench import machine
from pd_connector.bench import plan as plan_module
from pd_connector.bench.contender import BASELINE, LINK, LINK_DEFAULT, LOCAL, Contender
from pd_connector.bench.flow import BenchError, Run, together
from pd_connector.bench.handoff import Findings, Measured, Measurement, Series, findings
from pd_connector.bench.machine import Noise, cpu_seconds, describe
from pd_connector.bench.model import KV_BYTES_PER_TOKEN, write_model
from pd_connector.bench.pair import Pair, Prompts, Stage
from pd_connector.bench.plan import Plan
from pd_connector.bench.report import Comparison, missed, table, write_json
from pd_connector.bench.sample import Sample
from pd_connector.cli import bench as command
from pd_connector.config import Config
from pd_connector.launch import Samples
from pd_connector.launch.netns import Namespace

ROW_KEYS = {"name", "params", "ours", "baseline", "unit", "ratio", "bar", "ok"}


def comparison(ours: float, baseline: float, bar: float | None = 1.0, **params: object):
    found = {"prompt_tokens": 3500, "transport": "shm", **params}
    return Comparison("handoff", found, Sample((ours,)), Sample((baseline,)), "ms", bar)


def text_of(rendered: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(rendered)
    return out.getvalue()


def test_a_sample_has_its_median_and_its_outer_deciles():
    sample = Sample(tuple(float(value) for value in (11, 1, 3, 2, 5, 4, 7, 6, 9, 8, 10)))
    assert (sample.p10, sample.median, sample.p90) == (2.0, 6.0, 10.0)


def test_deciles_between_two_values_are_interpolated():
    sample = Sample((10.0, 20.0))
    assert (sample.p10, sample.median, sample.p90) == (11.0, 15.0, 19.0)


def test_a_sample_of_one_value_is_that_value():
    sample = Sample((7.0,))
    assert (sample.p10, sample.median, sample.p90) == (7.0, 7.0, 7.0)


def test_a_sample_of_no_values_is_refused():
    with pytest.raises(ValueError, match="at least one run"):
        Sample(())


def test_scaling_changes_the_unit_and_nothing_else():
    assert Sample((0.5, 0.25)).scaled(1e3) == Sample((500.0, 250.0))


@pytest.mark.parametrize(
    ("ours", "bar", "ok"), [(9.0, 1.0, True), (10.0, 1.0, True), (10.1, 1.0, False)]
)
def test_a_bar_is_the_most_that_the_ratio_may_be(ours, bar, ok):
    found = comparison(ours, 10.0, bar)
    assert found.ok is ok
    assert missed([found]) == ([] if ok else [found])


@pytest.mark.parametrize(("ours", "ok"), [(9.8, True), (9.7, True), (9.6, False)])
def test_where_more_is_better_the_bar_is_the_least_that_the_ratio_may_be(ours, ok):
    rate = Comparison("wire", {}, Sample((ours,)), Sample((10.0,)), "GB/s", 0.97, True)
    assert rate.ok is ok
    assert rate.rows()[0].ok is ok
    assert "≥ 0.97" in text_of(table([rate], "line rate"))


def test_without_a_bar_nothing_is_missed():
    assert missed([comparison(99.0, 1.0, None)]) == []


def test_only_the_median_is_held_to_the_bar():
    found = Comparison("x", {}, Sample((1.0, 1.0, 99.0)), Sample((2.0, 2.0, 2.0)), "ms", 1.0)
    median, p10, p90 = found.rows()
    assert (median.params["statistic"], median.ratio, median.bar, median.ok) == (
        "median",
        0.5,
        1.0,
        True,
    )
    assert (p10.bar, p10.ok) == (None, True)
    assert p90.ratio > 1
    assert (p90.bar, p90.ok) == (None, True)


def test_the_json_file_is_an_array_of_rows_of_one_form(tmp_path):
    path = tmp_path / "figures.json"
    write_json(path, [comparison(9.0, 10.0), comparison(3.0, 2.0, None, prompt_tokens=512)])
    rows = json.loads(path.read_text())
    assert [set(row) for row in rows] == [ROW_KEYS] * 6
    assert rows[0] == {
        "name": "handoff",
        "params": {"prompt_tokens": 3500, "transport": "shm", "statistic": "median", "runs": 1},
        "ours": 9.0,
        "baseline": 10.0,
        "unit": "ms",
        "ratio": 0.9,
        "bar": 1.0,
        "ok": True,
    }
    names = [json.dumps([row["name"], row["params"]], sort_keys=True) for row in rows]
    assert len(set(names)) == len(rows), "name and params say which figure a row is"


def test_the_table_shows_both_sides_of_every_comparison():
    shown = text_of(table([comparison(8.0, 16.0), comparison(1234.0, 617.0)], "TheOther"))
    assert "TheOther" in shown
    assert "8.00 - 8.00" in shown
    assert "16.0 - 16.0" in shown
    assert "1,234 ms" in shown
    assert "0.50" in shown
    assert "yes" in shown
    assert "2.00" in shown
    assert "no" in shown
    assert "≤ 1.00" in shown


def test_a_terminal_of_80_columns_holds_the_table():
    out = io.StringIO()
    params = {"prompt_tokens": 3500, "codec": "fp8_e4m3", "overlap": "auto"}
    sides = Sample((9876.0,)), Sample((9877.0,))
    wide = Comparison("handoff", params, *sides, "ms", 1.0)
    Console(file=out, width=80, color_system=None).print(table([wide], "NixlConnector"))
    assert "9,876 - 9,876" in out.getvalue()
    assert "9,877 - 9,877" in out.getvalue()
    assert "≤ 1.00" in out.getvalue()
    assert "fp8_e4m3" in out.getvalue()
    assert "…" not in out.getvalue()


def test_the_description_of_a_machine_has_no_empty_lines():
    found = describe()
    assert {"processor", "memory", "versions", "date"} <= found.keys()
    assert all(found.values())


def test_cpu_time_of_a_process_grows_while_it_works_and_an_ended_one_has_none():
    code = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            deadline = time.monotonic() + 60
            while cpu_seconds([process.pid]) < 0.1:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.kill()
    assert cpu_seconds([process.pid]) == 0


def test_noise_is_what_the_machine_did_beyond_the_watched_processes(monkeypatch):
    clock, machine_s, own_s = iter((100.0, 104.0)), iter((50.0, 57.0)), iter((20.0, 23.0))
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(machine, "_busy_s", lambda: next(machine_s))
    monkeypatch.setattr(machine, "cpu_seconds", lambda pids: next(own_s))
    assert Noise([1, 2]).cores() == 1.0


class FakePair:
    """Records what is done to it; uses as many cores as it is told to."""

    def __init__(self, name: str, log: list[str], cores: float = 0.0, fetches: bool = True) -> None:
        self.contender = {"base": BASELINE, **LOCAL}.get(name) or Contender(name, name)
        self.engines = (SimpleNamespace(client=FakeTokenizer()), None)
        self.pids: list[int] = []
        self.prompts: list[list[int]] = []
        self.salts: list[str] = []
        self.frozen = False
        self.name = name
        self._log = log
        self._cores = cores
        self._fetches = fetches

    def cpu_seconds(self) -> float:
        return 0.0 if self.frozen else self._cores * time.monotonic()

    def pause(self) -> None:
        self.frozen = True

    def resume(self) -> None:
        self.frozen = False

    def begin(self) -> None:
        self._log.append("begin")

    def run(self, prompt, salt) -> Run:
        self._log.append(self.name)
        self.prompts.append(list(prompt))
        self.salts.append(salt)
        return Run(2.0, 0.001 * len(self.prompts), "ab")

    def check(self) -> None:
        assert not self.frozen, "a frozen engine does not answer"
        if not self._fetches:
            raise BenchError("it computed the prompt itself")


class FakeTokenizer:
    """A client whose engine's tokens are the characters' numbers."""

    base_url = "http://fake"

    def model(self) -> str:
        return "fake"

    def post(self, path, body):
        assert path == "/tokenize"
        return {"tokens": [ord(letter) for letter in body["prompt"]]}


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(handoff_module, "LOOK_S", 0.05)
    monkeypatch.setattr(handoff_module, "REST_WINDOW_S", 0.001)


def measure(pairs, lengths=(8,), runs=3, warm_ups=1) -> Findings:
    return findings([Measurement(pairs, runs, warm_ups, lambda line: None).measure(lengths)])


def test_pairs_take_turns_and_warm_ups_do_not_count(hasty):
    log: list[str] = []
    pairs = [FakePair("base", log), FakePair("shm", log)]
    found = measure(pairs)
    assert log == ["begin", "begin", *["base", "shm"] * 4]
    handoff, prefill = found.comparisons
    assert handoff.ours.values == (2.0, 3.0, 4.0)
    assert prefill.baseline.values == (2000.0, 2000.0, 2000.0)
    assert (handoff.unit, handoff.params) == ("ms", {"prompt_tokens": 8, "transport": "shm"})


def test_all_pairs_get_the_same_prompts_and_no_prompt_comes_twice(hasty):
    pairs = [FakePair(name, []) for name in ("base", "tcp", "shm")]
    measure(pairs, lengths=(40, 90))
    assert pairs[0].prompts == pairs[1].prompts == pairs[2].prompts
    assert pairs[0].salts == pairs[1].salts == pairs[2].salts
    assert [len(prompt) for prompt in pairs[0].prompts] == [40] * 4 + [90] * 4
    assert len({tuple(prompt) for prompt in pairs[0].prompts}) == 8
    assert len(set(pairs[0].salts)) == 8


def test_every_contender_is_compared_with_the_baseline(hasty):
    found = measure([FakePair(name, []) for name in ("base", "tcp", "shm")])
    compared = [(c.name, c.params["transport"]) for c in found.comparisons]
    assert compared == [
        ("handoff", "tcp"),
        ("handoff", "shm"),
        ("prefill", "tcp"),
        ("prefill", "shm"),
    ]


def test_on_one_machine_the_bar_is_set_for_the_handoff_of_long_prompts_only(hasty):
    found = measure([FakePair("base", []), FakePair("shm", [])], lengths=(512, 3500))
    bars = {(c.name, c.params["prompt_tokens"]): c.bar for c in found.comparisons}
    assert bars == {
        ("handoff", 512): None,
        ("prefill", 512): None,
        ("handoff", 3500): 1.0,
        ("prefill", 3500): None,
    }


def test_engines_that_spin_are_frozen_while_others_are_measured(hasty):
    spinning, quiet = FakePair("base", [], cores=1.8), FakePair("shm", [])
    seen: list[tuple[str, bool, bool]] = []
    for pair in (spinning, quiet):
        run = pair.run
        pair.run = lambda prompt, salt, pair=pair, run=run: (
            seen.append((pair.name, spinning.frozen, quiet.frozen)) or run(prompt, salt)
        )
    found = measure([spinning, quiet], runs=2, warm_ups=0)
    assert seen == [("base", False, False), ("shm", True, False)] * 2
    base, ours = found.series
    assert (base.frozen, ours.frozen) == (True, False)
    assert base.rest_cores > 1
    assert found.restless == 0


def test_a_pair_alone_is_never_frozen(hasty):
    spinning = FakePair("base", [], cores=1.8)
    measured = Measurement([spinning], 1, 0, lambda line: None).measure([8])
    assert not measured.series[0].frozen


def series(contender: Contender, *handoffs_s: float, text: str = "ab") -> Measured:
    """One pair measured alone, with prompts of 2,048 tokens."""
    runs = [Run(2.0, handoff_s, text) for handoff_s in handoffs_s]
    return Measured([Series(contender, {2048: runs}, 0.0, False)], 0, 0.0)


def test_pairs_measured_one_after_the_other_are_compared_with_the_baseline_of_both_ends():
    found = findings([series(BASELINE, 1.0), series(LINK["raw"], 0.9), series(BASELINE, 1.2)])
    handoff, _ = found.comparisons
    assert handoff.baseline.values == (1000.0, 1200.0)
    assert handoff.ours.values == (900.0,)
    assert handoff.params == {"prompt_tokens": 2048, "codec": "raw", "overlap": "off"}
    assert found.drift == {2048: 1.2}


def test_unlike_answers_are_counted_over_all_pairs():
    same, other = series(BASELINE, 1.0, 1.0), series(LINK["int8"], 1.0, 1.0, text="cd")
    assert findings([same, other, same]).unlike == 2
    assert findings([same, series(LINK["raw"], 1.0, 1.0), same]).unlike == 0


def test_findings_without_the_baseline_are_refused():
    with pytest.raises(ValueError, match="baseline"):
        findings([series(LINK["raw"], 1.0)])


def test_the_bars_over_the_link():
    bars = {name: [contender.bar(n) for n in (512, 2048, 3500)] for name, contender in LINK.items()}
    assert bars == {
        "raw": [0.97, 0.97, 0.97],
        "fp8_e4m3": [0.65, 0.55, 0.55],
        "int8": [0.65, 0.55, 0.55],
        "raw+overlap": [None, 0.30, 0.30],
        "fp8_e4m3+overlap": [None, 0.30, 0.30],
        "int8+overlap": [None, 0.30, 0.30],
    }


def test_over_the_link_one_pair_runs_at_a_time_and_the_baseline_twice():
    ours = [LINK["raw"], LINK["int8"]]
    names = [[c.name for c in group] for group in Plan(ours, 1000.0, None, [8], 1, 0).groups]
    assert names == [["NixlConnector"], ["raw"], ["int8"], ["NixlConnector"]]
    on_one_machine = Plan([LOCAL["shm"]], None, None, [8], 1, 0).groups
    assert [[c.name for c in group] for group in on_one_machine] == [["NixlConnector", "shm"]]


def carried_out(monkeypatch, plan: Plan) -> list[Stage]:
    """The stages on which the plan measures, with namespaces that nobody has made."""
    sides = tuple(Namespace(n, f"198.19.0.{n}", f"198.18.0.{n}") for n in ("1", "2"))
    bed = contextlib.nullcontext(SimpleNamespace(namespaces=sides))
    stages: list[Stage] = []

    def measured(self, group, stage, console):
        stages.append(stage)
        if stage.namespaces:
            assert (Path(stage.model) / "config.json").exists()
        return series(group[0], 1.0)

    monkeypatch.setattr(plan_module, "log_folder", lambda: Path("unused"))
    monkeypatch.setattr(plan_module, "Bed", lambda rate_mbit: bed)
    monkeypatch.setattr(Plan, "_measure", measured)
    plan.carry_out(Console(file=io.StringIO()))
    return stages


def test_all_pairs_stand_on_one_stage_and_its_model_is_removed_afterwards(monkeypatch):
    stages = carried_out(monkeypatch, Plan([LINK["raw"]], 1000.0, None, [2048], 1, 0))
    assert len(stages) == 3
    assert len({id(stage) for stage in stages}) == 1
    (stage, *_) = stages
    assert "dummy" in stage.args
    assert len(stage.env["PD_CONNECTOR_KEY"]) >= 16
    assert not Path(stage.model).exists()
    pair = Pair.of(LINK["raw"], stage)
    producer, consumer = (engine.environment() for engine in pair.engines)
    assert producer["PD_CONNECTOR_HOST"] == "198.19.0.1"
    assert consumer["PD_CONNECTOR_HOST"] == "198.19.0.2"


def test_a_model_that_is_named_is_loaded_with_its_weights(monkeypatch, tmp_path):
    (tmp_path / "config.json").touch()
    plan = Plan([LINK["raw"]], 1000.0, str(tmp_path), [2048], 1, 0)
    (stage, *_) = carried_out(monkeypatch, plan)
    assert (stage.model, list(stage.args)) == (str(tmp_path), [])


def test_only_transports_that_take_the_link_are_compared_over_it():
    assert {tuple(c.config["transports"]) for c in LINK.values()} == {("tcp",)}


@pytest.mark.parametrize("ours", [*LINK.values(), *LOCAL.values()], ids=lambda ours: ours.name)
def test_every_contenders_config_is_one_that_the_connector_takes(ours):
    config = Config.load(ours.config, {})
    assert list(config.transports) == ours.config["transports"]


def test_the_measuring_model_has_32_kib_of_kv_per_token(tmp_path):
    config = json.loads((write_model(tmp_path) / "config.json").read_text())
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    assert 2 * 2 * heads * config["head_dim"] == KV_BYTES_PER_TOKEN == 32 * 1024
    assert config["dtype"] == "bfloat16"
    assert (tmp_path / "tokenizer.json").exists()


def test_a_run_that_begins_beside_a_busy_engine_is_counted(hasty, monkeypatch):
    monkeypatch.setattr(handoff_module, "REST_TIMEOUT_S", 0.0)
    busy = FakePair("base", [])
    other = FakePair("shm", [])
    measurement = Measurement([busy, other], 2, 0, lambda line: None)
    busy._cores = 1.0  # it comes to work after it has been looked at
    assert measurement.measure([8]).restless == 4


def test_times_of_a_decode_engine_that_computed_the_prompt_are_refused(hasty):
    with pytest.raises(BenchError, match="computed the prompt itself"):
        measure([FakePair("base", []), FakePair("shm", [], fetches=False)])


def test_prompts_are_of_exact_length_and_made_of_the_models_own_tokens():
    prompts = Prompts(FakeTokenizer())
    found = [prompts.make(length) for length in (2, 33, 500)]
    assert [len(prompt) for prompt in found] == [2, 33, 500]
    assert all(chr(token).isprintable() for prompt in found for token in prompt)


class FakeEngine:
    """An engine whose answers and metrics are given."""

    def __init__(self, params=None, metrics=()) -> None:
        self.name = "fake engine"
        self.log_path = "fake.log"
        self.base_url = f"http://{id(self)}"
        self.client = self
        self.bodies: list[dict] = []
        self._params = params
        self._metrics = list(metrics)

    def model(self) -> str:
        return "fake"

    def post(self, path, body):
        self.bodies.append(body)
        return {"choices": [{"text": "a"}], "kv_transfer_params": self._params}

    def stream(self, path, body):
        self.bodies.append(body)
        yield {"choices": []}
        yield {"choices": [{"text": "a"}]}
        yield {"choices": [{"text": "b"}]}

    def metrics(self) -> Samples:
        return Samples.parse(self._metrics.pop(0))


def fetched(tokens: int) -> str:
    return f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {tokens}\n'


def test_a_run_plays_a_two_step_proxy():
    p, d = FakeEngine({"remote_host": "h"}), FakeEngine()
    run = Pair(Contender("x", "X"), p, d).run([5, 6, 7], "salt")
    assert run.text == "ab"
    (to_p,), (to_d,) = p.bodies, d.bodies
    assert to_p["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert to_p["max_tokens"] == 1
    assert to_d["kv_transfer_params"] == {"remote_host": "h"}
    for body in (to_p, to_d):
        assert (body["prompt"], body["cache_salt"], body["temperature"]) == ([5, 6, 7], "salt", 0)


def test_with_overlap_both_engines_are_asked_at_once_for_a_transfer_named_by_the_asker():
    address = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 5, "tp_size": 1}
    p, d = FakeEngine(address), FakeEngine()
    asked = threading.Barrier(2, timeout=30)
    ask_p, ask_d = p.post, d.stream

    def post(path, body):
        if not body["kv_transfer_params"].get("describe"):
            asked.wait()  # breaks unless the decode engine is asked before this is answered
        return ask_p(path, body)

    def stream(path, body):
        asked.wait()
        return ask_d(path, body)

    p.post, d.stream = post, stream
    run = Pair(Contender("x", "X", flow=together), p, d).run([5, 6, 7], "salt")
    assert run.text == "ab"
    (probe, to_p), (to_d,) = p.bodies, d.bodies
    assert probe["kv_transfer_params"]["describe"]
    transfer = to_p["kv_transfer_params"]["transfer_id"]
    assert to_p["kv_transfer_params"]["do_remote_decode"]
    assert to_d["kv_transfer_params"] == {
        "remote_engine_id": "e",
        "remote_host": "h",
        "remote_port": 5,
        "remote_request_id": transfer,
        "remote_block_ids": None,
        "do_remote_prefill": True,
        "do_remote_decode": False,
    }
    assert to_p["prompt"] == to_d["prompt"] == [5, 6, 7]


def test_an_engine_that_does_not_describe_itself_is_an_error():
    pair = Pair(Contender("x", "X", flow=together), FakeEngine({"remote_host": "h"}), FakeEngine())
    with pytest.raises(BenchError, match="remote_engine_id"):
        pair.run([5], "salt")


def test_a_prefill_that_offers_nothing_is_an_error():
    with pytest.raises(BenchError, match="without kv_transfer_params"):
        Pair(Contender("x", "X"), FakeEngine(None), FakeEngine()).run([5, 6], "salt")


def test_a_pair_whose_prompts_all_arrived_passes():
    d = FakeEngine(metrics=[fetched(1000), fetched(1200)])
    pair = Pair(Contender("x", "X"), FakeEngine({"remote_host": "h"}), d)
    pair.begin()
    pair.run([1] * 200, "salt")
    pair.check()


@pytest.mark.parametrize(
    "after",
    [
        fetched(1100),
        fetched(1200) + 'pd_connector:failed_transfers_total{cause="stalled"} 1\n',
        fetched(1200) + "vllm:nixl_num_failed_transfers_total 1\n",
    ],
)
def test_a_pair_whose_prompts_were_computed_by_the_decode_engine_does_not(after):
    d = FakeEngine(metrics=[fetched(1000), after])
    pair = Pair(Contender("x", "X"), FakeEngine({"remote_host": "h"}), d)
    pair.begin()
    pair.run([1] * 200, "salt")
    with pytest.raises(BenchError, match="computed the rest itself"):
        pair.check()


def outcome(*comparisons: Comparison) -> Findings:
    found = [Series(BASELINE, {}, 1.9, True), Series(LOCAL["shm"], {}, 0.01, False)]
    return Findings(list(comparisons), found, 0, 0.02, 0, {512: 1.01})


@pytest.fixture
def invoke(monkeypatch):
    """Runs `bench handoff` with these findings, or this error, in place of a measurement."""
    asked: list[Plan] = []

    def run(found, *arguments: str):
        def carry_out(self, console):
            asked.append(self)
            if isinstance(found, BaseException):
                raise found
            return found

        monkeypatch.setattr(plan_module.Plan, "carry_out", carry_out)
        monkeypatch.setattr(command, "_check_possible", lambda plan: None)
        return CliRunner().invoke(command.app, ["handoff", *arguments])

    run.asked = asked
    return run


def test_the_command_prints_the_table_and_writes_the_rows(invoke, tmp_path):
    path = tmp_path / "figures.json"
    result = invoke(outcome(comparison(9.0, 10.0)), "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "NixlConnector" in result.output
    assert "frozen" in result.output
    assert [set(row) for row in json.loads(path.read_text())] == [ROW_KEYS] * 3


def test_the_exit_code_tells_a_missed_bar_from_no_measurement(invoke):
    assert invoke(outcome(comparison(11.0, 10.0))).exit_code == 1
    assert invoke(BenchError("nothing came")).exit_code == 2
    assert invoke(KeyboardInterrupt()).exit_code == 130


def test_a_missed_bar_is_no_reason_not_to_write_the_rows(invoke, tmp_path):
    path = tmp_path / "figures.json"
    invoke(outcome(comparison(11.0, 10.0)), "--json", str(path))
    assert json.loads(path.read_text())[0]["ok"] is False


def test_without_arguments_all_four_are_compared_over_the_link(invoke):
    invoke(outcome(comparison(9.0, 10.0)))
    (plan,) = invoke.asked
    assert [c.name for c in plan.ours] == list(LINK_DEFAULT)
    assert (plan.link_mbit, list(plan.prompt_tokens)) == (1000.0, [512, 2048, 3500])


def test_on_one_machine_each_transport_gets_a_pair_of_its_own(invoke):
    invoke(outcome(comparison(9.0, 10.0)), "--local", "--ours", "tcp", "--ours", "nixl")
    (plan,) = invoke.asked
    assert [c.config for c in plan.ours] == [{"transports": ["tcp"]}, {"transports": ["nixl"]}]
    assert plan.link_mbit is None


@pytest.mark.parametrize("arguments", [["--ours", "rwa"], ["--local", "--ours", "raw"]])
def test_an_unknown_contender_is_refused_with_those_there_are(invoke, arguments):
    result = invoke(outcome(), *arguments)
    assert result.exit_code == 2
    assert ("shm" if "--local" in arguments else "raw+overlap") in result.output
    assert not invoke.asked


def test_without_namespaces_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(command, "available", lambda: "`ip` is missing")
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: name)
    result = CliRunner().invoke(command.app, ["handoff"])
    assert result.exit_code == 2
    assert "ip` is missing" in result.output
    assert "--local" in result.output
