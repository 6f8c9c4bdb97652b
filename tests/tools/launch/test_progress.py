# SPDX-License-Identifier: Apache-2.0
"""A person who waits reads at least every BEAT_S how long it has taken, and what is waited for."""

import io
import sys
import time

import pytest
from rich.console import Console
from support.waits import until

from pd_connector.tools.launch import Service, progress, stop_services, wait_all, working

SLOW = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
print("(EngineCore pid=7) INFO 11-28 19:44:11 [core.py:133] Initializing a V1 LLM engine", flush=True)
print("(EngineCore pid=7) WARNING 11-28 19:44:12 [cpu.py:1] reading the [weights]", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.02)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Slow(Service):
    """Is ready once a file is there."""

    def __init__(self, folder):
        super().__init__("prefill", folder / "prefill.log")
        self.file = folder / "go on"

    def command(self):
        return [sys.executable, "-c", SLOW, str(self.port), str(self.file)]


class Lines(io.StringIO):
    """Calls a function with all that was written, at each write."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def write(self, text):
        written = super().write(text)
        self.look(self.getvalue())
        return written


@pytest.fixture
def short_beat(monkeypatch):
    monkeypatch.setattr(progress, "BEAT_S", 0.3)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_start_that_stands_still_says_its_seconds_and_the_last_line_of_the_log(
    tmp_path, short_beat, terminal
):
    """It said "starting the worker" once, and nothing for minutes."""
    service = Slow(tmp_path)
    line = "starting the worker: reading the [weights]"

    def look(written):
        if written.count(line) >= 3:
            service.file.touch()

    output = Lines(look)
    service.start()
    try:
        wait_all([service], Console(file=output, force_terminal=terminal, width=100))
    finally:
        stop_services([service])
    assert output.getvalue().count(line) >= 3
    if not terminal:
        beats = [text for text in output.getvalue().splitlines() if line in text]
        assert all(text.split()[1:3] == ["s", "prefill:"] for text in beats)


def test_a_phase_that_changes_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "BEAT_S", 600.0)
    service, output = Slow(tmp_path), io.StringIO()
    service.file.touch()
    service.start()
    try:
        wait_all([service], Console(file=output, width=100))
    finally:
        stop_services([service])
    assert output.getvalue().count("ready") == 1
    assert "[weights]" not in output.getvalue()


def test_work_says_what_it_is_at_every_beat_and_nothing_afterwards(short_beat):
    output = io.StringIO()
    with working(Console(file=output), "warming up") as say:
        until(lambda: output.getvalue().count("s  warming up\n") >= 2)
        say("prompt of [3,000] tokens")
        until(lambda: "s  prompt of [3,000] tokens\n" in output.getvalue())
    ended = output.getvalue()
    time.sleep(0.7)
    assert output.getvalue() == ended


def test_work_that_takes_a_moment_says_nothing_without_a_terminal():
    output = io.StringIO()
    with working(Console(file=output), "looking"):
        pass
    assert output.getvalue() == ""


def test_work_at_a_terminal_shows_the_words_of_the_moment():
    output = io.StringIO()
    with working(Console(file=output, force_terminal=True, width=80), "looking") as say:
        say("asking http://[::1]:8100")
        until(lambda: "asking http://[::1]:8100" in output.getvalue())
