# SPDX-License-Identifier: Apache-2.0
"""The order of runs, what is compared with what, and which contenders there are."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.bench import FakeTokenizer

from pd_bench.flow import Run
from pd_bench.handoff import bench as bench_module
from pd_bench.handoff import cross, sglang, vllm
from pd_bench.handoff import measure as measure_module
from pd_bench.handoff.bench import HandoffBench
from pd_bench.handoff.contender import Contender
from pd_bench.handoff.findings import (
    HandoffFindings,
    MeasuredPairs,
    Series,
    findings,
)
from pd_bench.handoff.measure import TurnMeasurement
from pd_bench.handoff.pair import PairSetup
from pd_bench.handoff.receiving import Receiving
from pd_bench.handoff.vllm import BASELINE, VllmPair
from pd_bench.model import KV_BYTES_PER_TOKEN, write_model
from pd_bench.netns import Namespace
from pd_bench.report import BenchError
from pd_connector.config import Config

LINK, LOCAL = vllm.LINK.ours, vllm.LOCAL.ours


class FakePair:
    """Records what is done to it; uses as many cores as it is told to."""

    measured_receiving = False

    def __init__(self, name: str, log: list[str], cores: float = 0.0, fetches: bool = True) -> None:
        self.contender = {"base": BASELINE, **LOCAL}.get(name) or Contender(name, name)
        self.engines = (SimpleNamespace(client=FakeTokenizer()), None)
        self.prompts: list[list[int]] = []
        self.salts: list[str] = []
        self.frozen = False
        self.name = name
        self._log = log
        self._cores = cores
        self._fetches = fetches

    def cpu_seconds(self) -> float:
        return 0.0 if self.frozen else self._cores * measure_module.time.monotonic()

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


@pytest.fixture
def hasty(monkeypatch):
    """No time passes but that which is slept, and that at once."""
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(measure_module, "time", clock)


def measure(pairs, lengths=(8,), runs=3, warm_ups=1) -> HandoffFindings:
    return findings([TurnMeasurement(pairs, runs, warm_ups, lambda line: None).measure(lengths)])


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


def test_pairs_that_spin_are_looked_at_one_by_one(monkeypatch):
    """Looked at together they would share the cores: each would seem busy once it has them alone."""
    both, now_s = [FakePair("base", []), FakePair("shm", [])], [0.0]
    used_s = dict.fromkeys(("base", "shm"), 0.0)

    def sleep(seconds: float) -> None:
        """Two cores, shared by those that are not frozen."""
        awake = [pair for pair in both if not pair.frozen]
        for pair in awake:
            used_s[pair.name] += 2.0 / len(awake) * seconds
        now_s[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(measure_module, "time", clock)
    for pair in both:
        monkeypatch.setattr(pair, "cpu_seconds", lambda pair=pair: used_s[pair.name])
    found = measure(both, runs=1, warm_ups=0)
    assert [series.rest_cores for series in found.series] == [pytest.approx(2.0)] * 2
    assert found.restless == 0


def test_a_pair_alone_is_never_frozen(hasty):
    spinning = FakePair("base", [], cores=1.8)
    measured = TurnMeasurement([spinning], 1, 0, lambda line: None).measure([8])
    assert not measured.series[0].frozen


def series(contender: Contender, *handoffs_s: float, text: str = "ab") -> MeasuredPairs:
    """One pair measured alone, with prompts of 2,048 tokens."""
    runs = [Run(2.0, handoff_s, text) for handoff_s in handoffs_s]
    return MeasuredPairs([Series(contender, {2048: runs}, 0.0, False)], 0, 0.0)


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
    bars = {
        name: [contender.bar(BASELINE.name, n) for n in (512, 2048, 3500)]
        for name, contender in LINK.items()
    }
    assert bars == {
        "raw": [0.97, 0.97, 0.97],
        "fp8_e4m3": [0.65, 0.55, 0.55],
        "int8": [0.65, 0.55, 0.55],
        "raw+overlap": [None, 0.30, 0.30],
        "fp8_e4m3+overlap": [None, 0.30, 0.30],
        "int8+overlap": [None, 0.30, 0.30],
        "auto": [None, None, None],
    }


def test_over_the_link_one_pair_runs_at_a_time_and_the_baseline_twice():
    ours = [LINK["raw"], LINK["int8"]]
    names = [
        [c.name for c in group]
        for group in HandoffBench(vllm.LINK, ours, 1000.0, None, [8], 1, 0).groups
    ]
    assert names == [["NixlConnector"], ["raw"], ["int8"], ["NixlConnector"]]
    on_one_machine = HandoffBench(vllm.LOCAL, [LOCAL["shm"]], None, None, [8], 1, 0).groups
    assert [[c.name for c in group] for group in on_one_machine] == [["NixlConnector", "shm"]]


def carried_out(
    monkeypatch, plan: HandoffBench, failing: str = ""
) -> tuple[list[PairSetup], HandoffFindings]:
    """The stages on which the plan measures, with namespaces that nobody has made."""
    sides = tuple(Namespace(n, f"198.19.0.{n}", f"198.18.0.{n}") for n in ("1", "2"))
    bed = contextlib.nullcontext(SimpleNamespace(namespaces=sides))
    stages: list[PairSetup] = []

    def measured(self, group, stage, console):
        stages.append(stage)
        if group[0].name == failing:
            raise BenchError("its engine died")
        if stage.namespaces:
            assert (Path(stage.model) / "config.json").exists()
        return series(group[0], 1.0)

    monkeypatch.setattr(bench_module, "log_folder", lambda: Path("unused"))
    monkeypatch.setattr(bench_module, "Bed", lambda rate_mbit: bed)
    monkeypatch.setattr(HandoffBench, "_measure", measured)
    return stages, plan.measure(Console(file=io.StringIO()))


def test_a_contender_that_fails_costs_its_own_figures_only(monkeypatch):
    plan = HandoffBench(vllm.LINK, [LINK["raw"], LINK["int8"]], 1000.0, None, [2048], 1, 0)
    _, found = carried_out(monkeypatch, plan, "int8")
    assert found.failures == {"int8": "its engine died"}
    assert {one.contender.name for one in found.series} == {BASELINE.name, "raw"}
    for failing in (BASELINE.name, "raw"):
        with pytest.raises(BenchError, match="its engine died"):
            carried_out(
                monkeypatch,
                HandoffBench(vllm.LINK, [LINK["raw"]], 1000.0, None, [2048], 1, 0),
                failing,
            )


def test_all_pairs_stand_on_one_stage_and_its_model_is_removed_afterwards(monkeypatch):
    stages, _ = carried_out(
        monkeypatch, HandoffBench(vllm.LINK, [LINK["raw"]], 1000.0, None, [2048], 1, 0)
    )
    assert len(stages) == 3
    assert len({id(stage) for stage in stages}) == 1
    (stage, *_) = stages
    assert "dummy" in stage.args
    assert len(stage.env["PD_CONNECTOR_KEY"]) >= 16
    assert not Path(stage.model).exists()
    pair = VllmPair.of(LINK["raw"], stage)
    producer, consumer = (engine.environment() for engine in pair.engines)
    assert producer["PD_CONNECTOR_HOST"] == "198.19.0.1"
    assert consumer["PD_CONNECTOR_HOST"] == "198.19.0.2"


def test_a_model_that_is_named_is_loaded_with_its_weights(monkeypatch, tmp_path):
    (tmp_path / "config.json").touch()
    plan = HandoffBench(vllm.LINK, [LINK["raw"]], 1000.0, str(tmp_path), [2048], 1, 0)
    (stage, *_), _ = carried_out(monkeypatch, plan)
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
    monkeypatch.setattr(measure_module, "REST_TIMEOUT_S", 0.0)
    busy = FakePair("base", [])
    other = FakePair("shm", [])
    measurement = TurnMeasurement([busy, other], 2, 0, lambda line: None)
    busy._cores = 1.0  # it comes to work after it has been looked at
    assert measurement.measure([8]).restless == 4


def test_times_of_a_decode_engine_that_computed_the_prompt_are_refused(hasty):
    with pytest.raises(BenchError, match="computed the prompt itself"):
        measure([FakePair("base", []), FakePair("shm", [], fetches=False)])


def of_sglang(name: str, handoff_s: float, receiving: Receiving | None = None) -> MeasuredPairs:
    contender = {**sglang.LINK.baselines, **sglang.LINK.ours}[name]
    runs = {2048: [Run(2.0, handoff_s, "ab")]}
    return MeasuredPairs([Series(contender, runs, 0.0, False, receiving)], 0, 0.0)


def test_ours_are_also_compared_among_themselves_where_a_bar_asks_for_it():
    found = findings(
        [
            of_sglang("NIXL page 16", 1.0),
            of_sglang("NIXL page 1", 2.0),
            of_sglang("raw", 0.9),
            of_sglang("raw page 1", 0.95),
            of_sglang("NIXL page 16", 1.2),
        ]
    )
    handoffs = {
        (other, c.params["engines"]): (c.baseline.values, c.bar, c.ok)
        for other, comparisons in found.tables
        for c in comparisons
        if c.name == "handoff"
    }
    assert handoffs == {
        ("NIXL page 16", "page 16"): ((1000.0, 1200.0), 0.97, True),
        ("NIXL page 1", "page 1"): ((2000.0,), 0.97, True),
        ("raw", "page 1"): ((900.0,), 1.00, False),
    }
    assert found.drift == {2048: 1.2}


def test_engines_of_two_kinds_are_held_to_the_slower_pair_of_one_kind():
    def of(name: str, handoff_s: float) -> MeasuredPairs:
        return series({**cross.LINK.baselines, **cross.LINK.ours}[name], handoff_s)

    found = findings(
        [
            of("vLLM to vLLM", 0.6),
            of("SGLang to SGLang", 0.7),
            of("vLLM to SGLang", 0.75),
            of("SGLang to vLLM", 0.8),
        ]
    )
    bars = {
        (other, c.params["engines"]): (c.bar, c.ok)
        for other, comparisons in found.tables
        for c in comparisons
        if c.name == "handoff"
    }
    assert bars == {
        ("vLLM to vLLM", "vLLM to SGLang"): (None, True),
        ("vLLM to vLLM", "SGLang to vLLM"): (None, True),
        ("SGLang to SGLang", "vLLM to SGLang"): (1.10, True),
        ("SGLang to SGLang", "SGLang to vLLM"): (1.10, False),
    }


def test_a_decode_engine_must_keep_its_token_rate_while_it_receives():
    base, slow = Receiving((1.0,), (100.0,)), Receiving((0.5,), (90.0,))
    found = findings([of_sglang("NIXL page 16", 1.0, base), of_sglang("raw", 0.9, slow)])
    by_name = {c.name: c for c in found.comparisons}
    assert (by_name["tokens/s"].bar, by_name["tokens/s"].ok) == (0.95, False)
    assert (by_name["CPU per GB"].ratio, by_name["CPU per GB"].bar) == (0.5, None)


def test_each_baseline_that_is_needed_is_measured_and_the_first_one_twice():
    ours = [sglang.LINK.ours[name] for name in ("raw", "raw page 1")]
    groups = HandoffBench(sglang.LINK, ours, 1000.0, None, [8], 1, 0).groups
    assert [one.name for (one,) in groups] == [
        "NIXL page 16",
        "NIXL page 1",
        "raw",
        "raw page 1",
        "NIXL page 16",
    ]


def test_the_bars_of_sglang():
    bars = {
        (name, other): [contender.bar(other, n) for n in (512, 2048)]
        for name, contender in sglang.LINK.ours.items()
        for other in contender.against
        if contender.against[other]
    }
    assert bars == {
        ("raw", "NIXL page 16"): [0.97, 0.97],
        ("int8", "NIXL page 16"): [0.65, 0.65],
        ("raw+layers", "NIXL page 16"): [None, 0.30],
        ("int8+layers", "NIXL page 16"): [None, 0.30],
        ("raw page 1", "NIXL page 1"): [0.97, 0.97],
        ("raw page 1", "raw"): [1.00, 1.00],
        ("raw page 1/64", "raw"): [1.10, 1.10],
        ("raw TP 2/1", "raw"): [1.10, 1.10],
    }
