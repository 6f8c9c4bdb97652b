# SPDX-License-Identifier: Apache-2.0
"""What `bench serve` sends, how it judges, and what it says where something is missing."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pd_bench.report import BenchError
from pd_bench.serve import pool
from pd_bench.serve.measure import Plan, Promise, Turn, compared
from pd_bench.serve.pool_turns import PLAIN, POOL
from pd_bench.serve.sending import Answer, completion_rate, send
from pd_bench.serve.trace import Line, TimedRequest, read, timed
from pd_connector.errors import ConfigError
from pd_connector.tools.cli import bench as command
from pd_connector.tools.launch import Client

LINES = [
    Line(timestamp=0, input_length=1024, output_length=64, hash_ids=[0, 1]),
    Line(timestamp=0, input_length=1300, output_length=10, hash_ids=[0, 1, 2]),
    Line(timestamp=3000, input_length=512, output_length=320, hash_ids=[7]),
]


def test_requests_have_the_traces_shape_at_the_asked_rate():
    requests = timed(LINES, per_s=2.0, scale=32, seed=1)
    assert requests[0].at_s == 0
    assert requests[-1].at_s == pytest.approx(len(LINES) / 2.0)
    by_length = sorted(requests, key=lambda one: len(one.prompt))
    assert [len(one.prompt) for one in by_length] == [16, 32, 41]
    assert [one.max_tokens for one in by_length] == [10, 2, 2]
    assert by_length[2].prompt.startswith(by_length[1].prompt), "equal ids, equal text"
    assert not by_length[1].prompt.startswith(by_length[0].prompt)


def test_another_run_finds_nothing_of_an_earlier_one_in_a_cache():
    first, again, other = (
        {one.prompt for one in timed(LINES, 1.0, 32, seed)} for seed in (1, 1, 2)
    )
    assert first == again
    assert not first & other


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 requests and 2 are needed"),
        ("timestamp,input\n1,2\n", "line 1: is not a trace in Mooncake's form"),
        (None, "cannot be read .No such file or directory.; `curl -LO https"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, text, words):
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BenchError, match=words):
        read(path, 2)


def test_a_run_is_judged_by_what_was_served_and_what_was_in_time():
    promise = Promise(ttft_s=1.0, tpot_s=0.1)
    ours = Turn([Answer(0.5, 0.05)] * 9 + [Answer(failure="503")], span_s=5.0)
    rival = Turn([Answer(0.5, 0.05)] * 3 + [Answer(2.0, 0.05)] * 7, span_s=5.0)
    found = {one.name: one for one in compared({0.8: [(ours, rival)]}, promise)}
    assert found["TTFT mean"].ours.median == 0.5
    assert found["TTFT mean"].baseline.median == pytest.approx(1.55)
    assert found["TTFT mean"].bar == 0.5
    assert found["TTFT mean"].ok
    assert found["goodput"].ratio == pytest.approx(3.0)
    assert found["goodput"].bar is None, "asked at 1.1 only"
    assert found["TPOT mean"].ok


def test_goodput_of_nothing_in_time_is_still_a_number():
    promise = Promise(ttft_s=0.1, tpot_s=0.1)
    turn = Turn([Answer(1.0, 0.05)] * 2, span_s=1.0)
    (goodput,) = [one for one in compared({1.1: [(turn, turn)]}, promise) if one.name == "goodput"]
    assert goodput.ratio == 1.0
    assert not goodput.ok


class _Server(BaseHTTPRequestHandler):
    """Answers as many tokens as are asked for; 503 for the prompt `refuse`, and breaks off at `cut`."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == "refuse":
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "%b"}]}\n\n' % self.server.letter)
        if body["prompt"] != "cut":
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as found:
        found.letter = b"a"
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        client = Client(f"http://127.0.0.1:{found.server_port}")
        client.server = found
        yield client
        found.shutdown()
        thread.join()


def test_every_request_is_answered_or_has_its_failure(server):
    prompts = ("fine", "refuse", "cut", "fine")
    requests = [TimedRequest(n * 0.01, prompt, 3) for n, prompt in enumerate(prompts)]
    answers = send(server, "m", requests)
    assert [bool(answer.failure) for answer in answers] == [False, True, True, False]
    assert "503" in answers[1].failure
    assert answers[0].ttft_s > 0
    rate, answers = completion_rate(server, "m", requests, at_once=2)
    assert rate > 0
    assert [bool(answer.failure) for answer in answers] == [False, True, True, False]


@pytest.mark.parametrize("more", [[], ["--pool"]])
def test_the_trace_is_looked_for_before_anything_else(tmp_path, more):
    trace, env = str(tmp_path / "absent.jsonl"), str(tmp_path / "nothing")
    result = CliRunner().invoke(command.app, ["serve", trace, "--peer-env", env, *more])
    assert result.exit_code == 2
    assert "absent.jsonl: cannot be read" in " ".join(result.output.split())


def test_without_the_rivals_router_the_command_says_how_to_get_it(tmp_path):
    env, trace = tmp_path / "nothing", tmp_path / "trace.jsonl"
    trace.write_bytes(150 * (msgspec.json.encode(LINES[0]) + b"\n"))
    result = CliRunner().invoke(command.app, ["serve", str(trace), "--peer-env", str(env)])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "python3 -m venv" in said
    assert "vllm-router==0.1.17" in said


def test_the_pool_has_room_for_all_that_is_sent_or_the_bench_says_what_would_fit(monkeypatch):
    lines = [Line(0, 16000, 384, [*range(32)])] * 8  # 1,024 tokens with /16: 64 MiB of KV
    monkeypatch.setattr(pool, "load", lambda value: None)
    assert pool.memory_for(lines, Plan((0.5,), 4, 2, 16.0)) == "2GiB"
    assert pool.memory_for(lines * 32, Plan((0.5, 0.8), 128, 2, 16.0)) == "42GiB"

    def refuse(value):
        raise ConfigError(f"{value['memory']} is wanted")

    monkeypatch.setattr(pool, "load", refuse)
    with pytest.raises(
        BenchError, match=r"pool of 2 GiB, and 1 GiB more.*fewer --requests.*3GiB is wanted"
    ):
        pool.memory_for(lines, Plan((0.5,), 4, 2, 16.0))


class _Stack:
    """A stack whose engines answer something else once they have been killed."""

    services, engines = (), ()

    def __init__(self, name, client, after):
        self.name, self._after = name, after
        self.router = SimpleNamespace(client=client, log_path=Path("log"))

    def kill_engines(self):
        self.router.client.server.letter = self._after

    def uses_pool(self):
        return True

    def named_pool(self):
        return 0.0

    loaded_chunks = named_pool


@pytest.mark.parametrize(("after", "equal"), [(b"a", 3), (b"b", 0)])
def test_answers_after_the_engines_death_are_held_to_those_without_a_pool(
    server, monkeypatch, tmp_path, after, equal
):
    monkeypatch.setattr(pool, "_SAVED_S", 0.0)
    monkeypatch.setattr(server, "model", lambda: "m", raising=False)
    pooled, plain = (_Stack(name, server, after) for name in (POOL, PLAIN))
    pooled.engines = (SimpleNamespace(client=server),)
    plan = Plan((0.5,), 3, 1, 32.0)
    found = pool.PoolMeasurement(
        pooled, plain, LINES, plan, tmp_path, lambda _: None, Console()
    ).measure()
    before, died = ({one.name: one for one in side} for side in (found.first, found.again))
    assert before["answers equal"].ok
    assert died["answers equal"].ours.values == (equal,)
    assert died["answers equal"].ok is (equal == 3)
    assert (before["TTFT mean"].bar, died["TTFT mean"].bar) == (1.1, 0.5)
    assert before["TPOT mean"].bar is None
