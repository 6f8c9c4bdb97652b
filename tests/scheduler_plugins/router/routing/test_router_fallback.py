# SPDX-License-Identifier: Apache-2.0
"""Clients are served whatever a policy of another package does."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
from router_fakes import World, run

from scheduler_plugins.router import limit
from scheduler_plugins.router.limit import LIMIT_S, Limited
from scheduler_plugins.router.policies import added
from scheduler_plugins.router.policies.base import Defer, Policy, Reject, Request, Role, Route, View
from scheduler_plugins.router.policies.sides import Rule
from scheduler_plugins.router.request import decision as decision_module

LATE_S = 0.05


class Theirs(Policy):
    """Does what a test says."""

    does: Callable[[View, float], Any] | None = None
    asked = 0

    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Any:
        type(self).asked += 1
        does = type(self).does
        return does(view, now_s) if does else None


class TheirRule(Rule):
    def choose(self, *arguments: Any) -> Any:
        raise ValueError("a bug")


@pytest.fixture(autouse=True)
def _their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def point(name: str, found: type) -> SimpleNamespace:
        source = "package 'theirs'"
        return SimpleNamespace(name=name, source=source, load=lambda: found, make=found)

    points = {"theirs": point("theirs", Theirs), "their_rule": point("their_rule", TheirRule)}
    monkeypatch.setattr(added, "load_entry_points", lambda group: points)
    monkeypatch.setattr(Theirs, "asked", 0)


def raises(error: BaseException) -> Callable[..., Any]:
    def raise_it(view: View, now_s: float) -> Any:
        raise error

    return raise_it


def never_returns(view: View, now_s: float) -> Any:
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def unknown_engine(view: View, now_s: float) -> Route:
    return Route("http://elsewhere", view.engines(Role.DECODE)[0].name)


WRONG = {
    "a bug": (raises(KeyError("costs")), "raised", "KeyError('costs')"),
    "it would end the process": (raises(SystemExit(1)), "raised", "SystemExit(1)"),
    "it would cancel the request": (raises(asyncio.CancelledError()), "raised", "CancelledError"),
    "nothing": (lambda view, now_s: None, "wrong", "must be a Route, Reject or Defer"),
    "an engine that is not there": (unknown_engine, "wrong", "p must be None or one of"),
    "a label without bounds": (
        lambda view, now_s: Reject(f"late by {now_s}", 1.0),
        "wrong",
        "cause must be a word",
    ),
    "it hangs": (never_returns, "late", "it had not returned after"),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_default_policy_decides_for_a_policy_that_fails(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    does, cause, told = WRONG[what]
    monkeypatch.setattr(Theirs, "does", does)
    monkeypatch.setattr(limit, "FIRST_PAUSE_S", limit.LONGEST_PAUSE_S)  # for all three requests
    if cause == "late":
        monkeypatch.setattr(limit, "LIMIT_S", LATE_S)

    async def scenario() -> None:
        async with World(1, 1, policy="theirs") as world:
            replies = [await world.complete(stream=stream) for stream in (True, False, False)]
            assert [reply.status for reply in replies] == [200] * 3
            counts = {
                c: await world.metric("policy_faults_total", cause=c) for c in (cause, "paused")
            }
            assert counts == (
                {"late": 1, "paused": 2} if cause == "late" else {cause: 3, "paused": 0}
            )

    run(scenario())
    (line,) = [one for one in caplog.records if "route policy theirs" in one.getMessage()]
    text = line.getMessage()
    assert "package 'theirs'" in text
    assert told in text
    assert "least_delay decides instead" in text
    assert "--policy" in text
    assert (line.exc_info is not None) == (cause != "wrong"), "a traceback shows where it failed"


def test_a_rule_of_another_package_for_decode_is_guarded_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with World(1, 2, policy="round_robin", decode_policy="their_rule") as world:
            assert (await world.complete()).status == 200

    run(scenario())
    assert any("'their_rule', which package 'theirs' adds, failed" in t for t in caplog.messages)


def test_a_policy_that_only_defers_keeps_no_request_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Theirs, "does", lambda view, now_s: Defer(now_s + 1e9))
    monkeypatch.setattr(decision_module, "LONGEST_PAUSE_S", 0.05)

    async def scenario() -> None:
        async with World(1, 1, policy="theirs", first_byte_timeout_s=1.0) as world:
            assert (await world.complete(stream=True)).status == 200
            assert await world.metric("policy_faults_total", cause="deferred") == 1

    run(scenario())
    assert Theirs.asked > 2, "it is asked again, although what it waits for never comes"
    assert any("deferred a request for 1 s" in text for text in caplog.messages)


def test_a_policy_that_hangs_is_asked_again_after_pauses_that_double() -> None:
    limited, now_s, pauses = Limited(), 0.0, []
    for _ in range(4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limit, "LIMIT_S", LATE_S)
            with pytest.raises(limit.LateError):
                limited.call(lambda: time.sleep(60), now_s)
        begun_s = now_s
        while limited.is_paused(now_s):
            now_s += 0.25
        pauses.append(round(now_s - begun_s - LATE_S))
    assert pauses == [1, 2, 4, 8]
    assert limited.call(lambda: 7, now_s) == 7
    assert not limited.is_paused(now_s)


def test_a_call_in_time_leaves_no_alarm_and_no_handler_behind() -> None:
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    assert Limited().call(sys.getrecursionlimit, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before[0]
    left_s = signal.getitimer(signal.ITIMER_REAL)[0]
    assert left_s == 0.0 if before[1] == 0.0 else before[1] - LIMIT_S < left_s <= before[1]


STANDS_STILL = """
import sys
from scheduler_plugins.router.limit import LIMIT_S, Limited


def waits():
    print(flush=True)
    return sys.stdin.readline()

limited = Limited()
print(limited.call(waits, 0.0), limited.took_s < LIMIT_S, limited.is_paused(0.0))
"""


def test_a_process_that_stood_still_inside_a_call_was_not_late() -> None:
    """The alarm of the whole limit came at once when the process ran again."""
    command = [sys.executable, "-c", STANDS_STILL]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        time.sleep(2 * LIMIT_S)
        child.stdin.write("7")
        child.stdin.close()
        child.send_signal(signal.SIGCONT)
        assert child.stdout.read().split() == ["7", "True", "False"]
