# SPDX-License-Identifier: Apache-2.0
"""What the engine measures of itself, and tells others."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from sched_rig import Rig, words

from scheduler_plugins.admission.board import Board
from scheduler_plugins.admission.ledger import Ledger
from scheduler_plugins.admission.post import Posted
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.vllm.steps import StepTimer, load_of


class Fit:
    model = CostModel(a=1.0)

    def __init__(self) -> None:
        self.seen: list[tuple[StepLoad, float]] = []

    def note(self, load: StepLoad, duration_s: float) -> None:
        self.seen.append((load, duration_s))


def output(**tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values())
    )


def state(computed: int, prompt: int, generated: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        num_computed_tokens=computed, num_prompt_tokens=prompt, num_output_tokens=generated
    )


REQUESTS = {"a": state(30, 100), "b": state(51, 50, generated=2)}


@pytest.fixture
def fit() -> Fit:
    return Fit()


def test_a_step_is_what_it_prefills_and_what_it_decodes() -> None:
    load = load_of(output(a=20, b=1), REQUESTS)
    assert load == StepLoad(tokens=20, pairs=30 * 30 - 10 * 10, batch=1, context=51)


def test_a_preempted_request_prefills_what_it_had_generated() -> None:
    load = load_of(output(a=60), {"a": state(60, 50, generated=10)})
    assert (load.tokens, load.batch) == (60, 0)


def test_a_step_takes_from_schedule_to_its_result(fit: Fit) -> None:
    timer = StepTimer(fit)
    first, second = output(a=20), output(b=1)
    timer.scheduled(first, REQUESTS, 10.0)
    assert timer.under_way_s == timer.prefilling_s == 20.0
    timer.ended(first, 11.5)
    timer.scheduled(second, REQUESTS, 20.0)
    timer.ended(second, 20.25)
    assert [duration for _, duration in fit.seen] == [1.5, 0.25]
    assert timer.under_way_s == 0.0


def test_steps_that_overlap_are_not_counted_twice(fit: Fit) -> None:
    timer = StepTimer(fit)
    steps = [output(a=20), output(a=10), output(b=1)]
    timer.scheduled(steps[0], REQUESTS, 0.0)
    timer.scheduled(steps[1], REQUESTS, 0.1)
    timer.ended(steps[0], 2.0)
    timer.scheduled(steps[2], REQUESTS, 2.1)
    timer.ended(steps[1], 3.0)
    timer.ended(steps[2], 3.5)
    assert [duration for _, duration in fit.seen] == [2.0, 1.0, 0.5]


def test_empty_steps_teach_nothing(fit: Fit) -> None:
    timer = StepTimer(fit)
    empty, step = output(), output(a=20)
    timer.scheduled(empty, REQUESTS, 0.0)
    timer.ended(empty, 5.0)
    timer.scheduled(step, REQUESTS, 1.0)
    timer.ended(step, 2.0)
    assert [duration for _, duration in fit.seen] == [1.0]


def test_a_step_without_a_result_is_forgotten(fit: Fit) -> None:
    timer = StepTimer(fit)
    lost, step = output(a=20), output(a=20)
    timer.scheduled(lost, REQUESTS, 0.0)
    timer.scheduled(step, REQUESTS, 1.0)
    timer.ended(step, 2.0)
    assert len(fit.seen) == 1
    assert timer.under_way_s == 0.0


@pytest.mark.parametrize("depth", [1, 2])
def test_the_engines_own_steps_teach_the_model(depth: int) -> None:
    rig = Rig(seconds_per_token=None, budget=256, depth=depth)
    for n in range(40):
        rig.add(f"r{n}", words(n, 8 * (1 + n)), 4)
        rig.run()
    rig.fit._learn()
    assert rig.fit._prefills == 40 + 8, "eight are cut into two chunks"
    assert rig.fit._decodes == 40 * 3


def test_a_preemption_between_steps_does_not_change_what_the_last_one_computed() -> None:
    rig = Rig(seconds_per_token=None, depth=2)
    rig.add("a", words(1, 40))
    output = rig.scheduler.schedule()  # vLLM asks for no bitmask here: a pooling model
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.scheduler._note_step()
    assert rig.scheduler._steps._open[-1][:2] == (output, StepLoad.of([(0, 40)]))


def test_predicted_and_actual_times_are_kept_for_each_class() -> None:
    ledger = Ledger()
    ledger.arrived("a", "free", 100.0, 0.5)
    ledger.arrived("b", "free", 100.0, 0.5)
    ledger.token("a", 102.0)
    ledger.token("a", 109.0)
    ledger.gone("a", tokens=12, most_tokens=20)
    ledger.gone("b", tokens=0, most_tokens=20)
    record = ledger.classes["free"]
    assert (record.ttft.sum_s, record.predicted_ttft.sum_s) == (2.0, 0.5)
    assert sum(record.ttft.counts) == 1
    assert ledger.generated == 12
    assert not ledger._open


def test_a_ledger_that_nobody_reads_does_not_grow() -> None:
    ledger = Ledger()
    for n in range(1000):
        ledger.arrived(str(n), "free", 0.0, 0.5)
        ledger.token(str(n), 1.0)
        ledger.gone(str(n), tokens=1, most_tokens=1)
    assert len(ledger._answered) < 300
    assert sum(ledger.classes["free"].ttft.counts) == 1000


def test_the_mean_of_generated_tokens_is_a_mean_at_first() -> None:
    ledger = Ledger()
    for n, tokens in enumerate((10, 20, 30)):
        ledger.arrived(str(n), "free", 0.0, 0.0)
        ledger.token(str(n), 1.0)
        ledger.gone(str(n), tokens, 99)
    assert ledger.generated == pytest.approx(20, rel=0.02)


def board_of(rig: Rig, boards: Path) -> Posted:
    assert file_of(rig, boards)
    posted = Board(rig.config.instance_id, folder=boards).posted()
    assert posted is not None
    return posted


def file_of(rig: Rig, boards: Path) -> list[Path]:
    return list(boards.glob(f"{rig.config.instance_id}.*"))


def test_the_board_says_what_waits_runs_and_is_to_be_expected(boards: Path) -> None:
    rig = Rig(seqs=1, budget=64)
    rig.add("decodes", words(1, 20), 9)
    for _ in range(3):
        rig.step()
    rig.add("waits", words(2, 100))
    time.sleep(0.06)
    rig.step()
    posted = board_of(rig, boards)
    assert not posted.idle
    report = posted.report
    assert (report.classes["default"].waiting, report.classes["default"].tokens) == (1, 100)
    assert sum(report.classes["default"].work_s) == pytest.approx(0.1)
    (decoding,) = report.decoding
    assert decoding.context == 23
    assert report.prefill_left_s == 0.0
    rig.run()
    posted = board_of(rig, boards)
    assert posted.idle
    assert posted.report.classes["default"].waiting == 0
    assert sum(posted.classes["default"].ttft.counts) == 2
    assert posted.report.decode_tokens == 9


def test_the_board_counts_the_prefill_under_way_and_what_is_left_of_it(boards: Path) -> None:
    rig = Rig(budget=64)
    rig.add("long", words(1, 200))
    rig.scheduler.get_grammar_bitmask(rig.scheduler.schedule())
    posted = board_of(rig, boards)
    assert posted.step_s == pytest.approx(0.064)
    assert posted.report.prefill_left_s == pytest.approx(0.2)


def test_what_is_done_behind_the_model_is_done_even_if_vllm_does_not_ask(boards: Path) -> None:
    rig = Rig(budget=64)
    rig.scheduler.get_grammar_bitmask = lambda output: None
    rig.add("long", words(1, 200))
    rig.step()
    assert not file_of(rig, boards), "nobody asked yet"
    rig.step()
    assert board_of(rig, boards).report.prefill_left_s == pytest.approx(0.136)


def test_the_board_is_taken_down_with_the_engine(boards: Path) -> None:
    rig = Rig()
    rig.add("a", words(1, 20))
    rig.run()
    board_of(rig, boards)
    rig.scheduler.shutdown()
    assert not file_of(rig, boards)


def test_an_engine_that_cannot_post_serves_all_the_same(
    boards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    rig.add("a", words(1, 20))
    rig.step()
    monkeypatch.setattr(os, "pwrite", _full)
    rig.add("b", words(2, 20))
    rig.run()
    rig.assert_served()
    assert not file_of(rig, boards), "what cannot be kept up to date must not be believed"
    monkeypatch.undo()
    boards.chmod(0o755)
    second = Rig()
    boards.chmod(0o700)
    second.add("a", words(1, 20))
    second.run()
    second.assert_served()
    assert not file_of(second, boards)


def _full(file: int, content: bytes, offset: int) -> int:
    raise OSError(28, "No space left on device")
