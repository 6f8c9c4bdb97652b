# SPDX-License-Identifier: Apache-2.0
"""The CPU time of requests with and without roles, and what the commands refuse."""

from __future__ import annotations

import ast
import inspect
import sys

from typer.testing import CliRunner

from pd_bench.roles.command import app
from pd_bench.roles.request_cost import UnknowingRouter, cpu_s
from scheduler_plugins.router.engines.observed import Observer


def test_the_router_without_roles_notes_no_request() -> None:
    """Else the notes of both sides would be compared, and found to be free."""
    command = UnknowingRouter(["http://p:1"], ["http://d:1"]).command()
    assert command[:2] == [sys.executable, "-c"]
    assert "--roles" not in command
    assert command[command.index("--prefill") + 1] == "http://p:1"
    tree = ast.parse(command[2])
    (names,) = [one.iter for one in ast.walk(tree) if isinstance(one, ast.For)]
    calls = {name for name, _ in inspect.getmembers(Observer, inspect.isfunction) if name[0] != "_"}
    assert set(ast.literal_eval(names)) == calls


def test_cpu_time_is_that_of_the_process() -> None:
    router = UnknowingRouter([], [])
    router.command = lambda: [sys.executable, "-c", "while True: pass"]  # type: ignore[method-assign]
    try:
        router.start()
        while cpu_s(router) < 0.1:
            assert router.running
    finally:
        router.stop()


def test_two_traces_of_one_name_are_refused() -> None:
    ended = CliRunner().invoke(app, ["shift", "monday/code.csv", "tuesday/code.csv"])
    assert ended.exit_code == 2
    assert "give two names" in ended.stderr
