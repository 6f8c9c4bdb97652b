# SPDX-License-Identifier: Apache-2.0
"""A compilation runs in the background, once, and its failure is kept."""

import threading

from pd_connector.compiler import BackgroundCompile


def test_a_compilation_is_begun_once_whoever_asks_and_nobody_waits_for_it():
    may_end, runs = threading.Event(), []
    work = BackgroundCompile(lambda: runs.append(may_end.wait(30)), "test", daemon=True)
    assert not work.begun
    askers = [threading.Thread(target=work.begin) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert (work.begun, work.ended, runs) == (True, False, [])
    may_end.set()
    assert work.wait()
    assert (work.ended, runs, work.problem) == (True, [True], None)


def test_what_the_compiler_raises_is_kept_for_whoever_waits():
    def fails() -> None:
        raise RuntimeError("no such target")

    work = BackgroundCompile(fails, "test", daemon=True)
    assert not work.wait()
    assert work.ended
    assert "no such target" in str(work.problem)


def test_compilations_that_share_a_lock_run_one_after_the_other():
    turn, first_ends, order = threading.Lock(), threading.Event(), []

    def first() -> None:
        first_ends.wait(30)
        order.append("first")

    one = BackgroundCompile(first, "test", turn=turn, daemon=True)
    with turn:  # so that the first is the first to take it
        one.begin()
        two = BackgroundCompile(lambda: order.append("second"), "test", turn=None, daemon=True)
        assert two.wait(), "another lock"
    other = BackgroundCompile(lambda: order.append("third"), "test", turn=turn, daemon=True)
    while not turn.locked():
        pass
    other.begin()
    first_ends.set()
    assert other.wait()
    assert one.wait()
    assert order == ["second", "first", "third"]
