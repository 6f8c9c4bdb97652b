# SPDX-License-Identifier: Apache-2.0
"""Starting, failing to start, ending and restarting a server."""

import io
import json
import os
import signal
import socket
import sys
import threading

import pytest
from rich.console import Console

from pd_connector.tools.launch import (
    Client,
    HttpError,
    RouterProcess,
    Samples,
    Service,
    StartError,
    wait_all,
)
from pd_connector.tools.launch.engine import CPU_ENVIRONMENT, VllmEngine
from pd_connector.tools.launch.service import stop_services
from pd_connector.tools.launch.start_log import likely_cause

SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, failure = int(sys.argv[1]), sys.argv[2]
if failure:
    sys.exit(failure)

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        text = {"/health": "", "/metrics": "# HELP a b\\na{x=\\"1\\"} 2\\na{x=\\"2\\"} 3.5\\n"}
        self.answer(200 if self.path in text else 404, text.get(self.path, "nothing here"))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body.get("stream"):
            return self.answer(200, json.dumps(body))
        self.send_response(200)
        self.end_headers()
        for n in range(body["events"]):
            self.wfile.write(b"data: " + json.dumps({"n": n}).encode() + b"\\n\\n")
        if not body.get("cut"):
            self.wfile.write(b"data: [DONE]\\n\\n")
        self.close_connection = True

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Small(Service):
    """A small HTTP server that ends with a message instead when it is given one."""

    def __init__(self, tmp_path, failure="", name="small"):
        super().__init__(name, tmp_path / f"{name}.log")
        self.failure = failure

    def command(self):
        return [sys.executable, "-c", SERVER, str(self.port), self.failure]


@pytest.fixture
def small(tmp_path):
    with Small(tmp_path) as service:
        yield service.wait_ready()


def test_a_service_is_ready_when_it_answers_and_gone_when_it_is_stopped(small):
    pid = small.family.pid
    assert small.client.healthy()
    small.stop()
    assert not small.client.healthy()
    assert not small.running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_service_starts_again_on_the_same_port(small):
    port = small.port
    small.kill()
    small.start().wait_ready()
    assert small.port == port
    assert small.client.healthy()


def test_a_service_that_is_started_twice_is_an_error(small):
    with pytest.raises(RuntimeError, match="stop or kill it first"):
        small.start()


def test_a_paused_service_does_not_answer_until_it_is_resumed(small):
    small.pause()
    assert not small.client.healthy(timeout_s=0.3)
    small.resume()
    assert small.client.healthy(timeout_s=10.0)


def test_a_failed_start_names_the_exit_code_the_cause_and_the_log(tmp_path):
    service = Small(tmp_path, "OSError: [Errno 98] Address already in use").start()
    with pytest.raises(StartError) as caught:
        service.wait_ready()
    for words in ("small", "code 1", "the port is taken", "| OSError", str(service.log_path)):
        assert words in str(caught.value)
    assert service.family is None


def test_a_start_that_takes_too_long_is_ended(tmp_path):
    service = Small(tmp_path)
    service.command = lambda: [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(StartError, match="not ready after"):
        service.start().wait_ready(timeout_s=0.1)
    assert service.family is None


def test_when_one_of_several_fails_all_are_ended(tmp_path):
    services = [Small(tmp_path, name="good"), Small(tmp_path, "no", name="bad")]
    for service in services:
        service.start()
    with pytest.raises(StartError, match="bad"):
        wait_all(services, console=Console(file=io.StringIO()))
    assert [service.family for service in services] == [None, None]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_names_every_service(tmp_path, terminal):
    services = [Small(tmp_path, name="first"), Small(tmp_path, name="second")]
    output = io.StringIO()
    try:
        for service in services:
            service.start()
        wait_all(services, console=Console(file=output, force_terminal=terminal, width=100))
    finally:
        stop_services(services)
    for service in services:
        assert service.name in output.getvalue()
    assert output.getvalue().count("ready") >= 2


def test_only_a_later_runs_log_counts(tmp_path):
    service = Small(tmp_path)
    service.log_path.write_text("CUDA out of memory\n")
    service.failure = "something else"
    with pytest.raises(StartError, match="unknown, see the log"):
        service.start().wait_ready()


def test_metrics_are_summed_over_labels(small):
    samples = small.metrics()
    assert samples.total("a") == 5.5
    assert samples.total("a", x="2") == 3.5
    assert samples.total("absent") == 0
    assert not samples.has("absent")
    assert samples.since(samples).total("a") == 0


def test_prometheus_text_with_quotes_and_no_labels():
    text = 'a 1\nb{c="d\\"},e",f="g"} 2e3 1700000000\n# TYPE a gauge\nn NaN\n'
    samples = Samples.parse(text)
    assert samples.total("a") == 1
    assert samples.total("b", f="g") == 2000
    assert samples.has("n")


def test_requests_and_streams(small):
    assert small.client.post("/x", {"a": 1}) == {"a": 1}
    assert list(small.client.stream("/x", {"events": 3})) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_stream_that_ends_early_is_an_error(small):
    events = small.client.stream("/x", {"events": 1, "cut": True})
    assert next(events) == {"n": 0}
    with pytest.raises(ConnectionError, match=r"before \[DONE\]"):
        next(events)


def test_an_answer_other_than_200_is_an_error_with_its_body(small):
    with pytest.raises(HttpError, match="nothing here") as caught:
        small.client.get("/nowhere")
    assert caught.value.status == 404


def test_closing_a_stream_hangs_up():
    """The server sees the client go: an engine then aborts the request."""
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n")
                while connection.recv(65536):
                    pass
                gone.set()

        threading.Thread(target=serve, daemon=True).start()
        stream = Client(f"http://127.0.0.1:{server.getsockname()[1]}").stream("/x", {})
        assert next(stream) == {}
        assert not gone.is_set()
        stream.close()
        assert gone.wait(10)


def test_an_unknown_failure_is_named_by_its_first_exception():
    """A worker's exception is followed by exceptions of all processes that waited for it."""
    prefix = "(EngineCore pid=7) ERROR 11-21 08:00:55 [core.py:1510] "
    log = [
        "(APIServer pid=6) WARNING [system_utils.py:255] errors like `OSError: [Errno 24] ...`",
        prefix + "Traceback (most recent call last):",
        prefix + "ImportError: cannot import name 'x'",
        "RuntimeError: Engine core initialization failed.",
    ]
    assert likely_cause(log, 1) == "ImportError: cannot import name 'x'"


def test_the_repeated_command_is_no_cause():
    assert likely_cause(["$ vllm --x 'CUDA out of memory'"], 1) is None
    assert "GPU" in (likely_cause(["RuntimeError: CUDA out of memory"], 1) or "")
    blind = "RuntimeError: Failed to infer device type, please set the environment variable"
    assert "nvidia-smi" in (likely_cause([blind], 1) or "")
    assert "SIGKILL" in (likely_cause([], -signal.SIGKILL) or "")
    of_sglang = ["AssertionError: no CUDA", "[22:55:02] kill_process_tree called: parent_pid=5"]
    assert likely_cause(of_sglang, -signal.SIGKILL) == "AssertionError: no CUDA"
    assert "SIGKILL" in (likely_cause(of_sglang[:1], -signal.SIGKILL) or "")


def test_an_engine_gets_the_cpu_settings_only_where_vllm_is_a_cpu_build(monkeypatch, tmp_path):
    engine = VllmEngine("model", "kv_producer", log_path=tmp_path / "log")
    for cpu in (True, False):
        monkeypatch.setattr("pd_connector.tools.launch.engine.on_cpu", lambda cpu=cpu: cpu)
        assert (CPU_ENVIRONMENT.items() <= engine.environment().items()) is cpu
        assert ("--enforce-eager" in engine.command()) is cpu


def test_an_engine_without_a_role_has_no_connector(tmp_path):
    assert "--kv-transfer-config" not in VllmEngine("m", log_path=tmp_path / "log").command()
    with pytest.raises(ValueError, match="without a connector"):
        VllmEngine("m", "kv_both", None, log_path=tmp_path / "log")


@pytest.mark.parametrize(
    ("disaggregates", "states", "ready"),
    [(True, ["up", "up"], True), (False, ["up", "up"], False), (True, ["up", "down"], False)],
)
def test_a_router_is_ready_when_it_can_hand_kv_over(
    tmp_path, monkeypatch, disaggregates, states, ready
):
    """It answers 200 as soon as any engine lives, long before that."""
    router = RouterProcess(["http://p"], ["http://d"], log_path=tmp_path / "log")
    health = {"disaggregates": disaggregates, "engines": [{"state": s} for s in states]}
    monkeypatch.setattr(Service, "ready", lambda self: True)
    monkeypatch.setattr(router.client, "get", lambda *args, **options: json.dumps(health))
    assert router.ready() is ready
    router.hands_over = False
    assert router.ready()


def test_two_engines_with_vllms_own_connector_have_different_side_channels(tmp_path):
    engines = [
        VllmEngine("m", "kv_both", "NixlConnector", log_path=tmp_path / "log") for _ in range(2)
    ]
    ports = {engine.environment()["VLLM_NIXL_SIDE_CHANNEL_PORT"] for engine in engines}
    assert len(ports) == 2
