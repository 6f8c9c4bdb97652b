# SPDX-License-Identifier: Apache-2.0
"""An engine or a router elsewhere: whether it is up, uses PDConnector, and has a control port that is reachable from here."""

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from pd_connector.config import HOST_VARIABLE, KEY_VARIABLE
from pd_connector.hosts import is_loopback
from pd_connector.remedies import outage_in, staged_in
from pd_connector.tools.cli.checks import router
from pd_connector.tools.cli.checks.finding import Finding, Status

BACKEND = "pd_connector"
"""SGLang's name for our transfer backend."""
TIMEOUT_S = 10.0
FIRST_CHOSEN = 32768
"""The first port that Linux gives to programs that ask for any."""
DESCRIBE_TIMEOUT_S = 60.0  # a busy engine answers after its present work
_DESCRIBE = {"do_remote_decode": True, "do_remote_prefill": False, "describe": True}

Ask = Callable[[str, Mapping[str, Any] | None], str]
"""GET a path of the peer, or POST a body to it; returns the answer's body. Raises PeerError."""
Connect = Callable[[str, int], str]
"""Open and close a TCP connection; returns why that failed, or an empty string."""
Greet = Callable[[str, int], tuple[str, str] | None]
"""Make the control channel's handshake; returns why it failed, and what to do (`handshake.greet`)."""


class PeerError(Exception):
    """There is no answer, or the answer is an error."""


def check(url: str, ask: Ask, connect: Connect, greet: Greet) -> list[Finding]:
    """All findings about one peer. Each needs the finding before it."""
    try:
        health = ask("/health", None)
    except PeerError as error:
        return [
            Finding(
                url,
                "reachable",
                Status.FAIL,
                str(error),
                "is the engine up, and does it listen on an address of this network "
                "(--host 0.0.0.0)? Is a firewall between? The URL is the engine's, not its control port",
            )
        ]
    reachable = Finding(url, "reachable", Status.OK, "healthy")
    if (routing := router.told(health)) is not None:
        return [reachable, *router.check(url, routing)]
    if (told := _sglang(ask)) is not None:
        return [reachable, *_sglang_findings(url, told, ask, connect, greet), *_transfers(url, ask)]
    findings = [reachable, _version(url, ask)]
    try:
        model = str(json.loads(ask("/v1/models", None))["data"][0]["id"])
        answer = json.loads(
            ask(
                "/v1/completions",
                {"model": model, "prompt": "a", "max_tokens": 1, "kv_transfer_params": _DESCRIBE},
            )
        )
        params = answer.get("kv_transfer_params")
    except (PeerError, ValueError, LookupError, TypeError, AttributeError) as error:
        advice = "the engine's own log says more; give its key with --api-key if it asks for one"
        findings.append(Finding(url, "answers", Status.FAIL, repr_short(error), advice))
        return findings
    findings.append(Finding(url, "answers", Status.OK, f"model {model}"))
    return [*findings, *_connector(url, params, ask, connect, greet), *_transfers(url, ask)]


def _sglang(ask: Ask) -> dict[str, Any] | None:
    """An SGLang engine's state; None for another engine."""
    try:
        told = json.loads(ask("/server_info", None))
    except (PeerError, ValueError):
        return None
    return told if isinstance(told, dict) and "disaggregation_mode" in told else None


def _sglang_findings(
    url: str, told: dict[str, Any], ask: Ask, connect: Connect, greet: Greet
) -> list[Finding]:
    """SGLang is not sent a prompt: it would refuse one without a bootstrap room."""
    mode, backend = told["disaggregation_mode"], told.get("disaggregation_transfer_backend")
    engine = Finding(url, "SGLang", Status.OK, f"{told.get('version', '?')}, {mode}")
    if mode not in ("prefill", "decode") or backend != BACKEND:
        found = f"disaggregation mode {mode}, transfer backend {backend}"
        advice = (
            "start it with --disaggregation-mode prefill (or decode) and "
            f"--disaggregation-transfer-backend {BACKEND}"
        )
        return [engine, Finding(url, "connector", Status.FAIL, found, advice)]
    if mode == "decode":
        found = "PDConnector, no control port: a decode engine dials and is not dialled"
        return [engine, Finding(url, "connector", Status.OK, found)]
    states = told.get("internal_states")
    states = states if isinstance(states, list) else []
    addresses = [state.get(BACKEND) if isinstance(state, dict) else None for state in states]
    known = [one for one in addresses if isinstance(one, dict) and one]
    if not known:
        advice = "see that engine's log: pd_connector says there why it was not registered"
        found = "its state has no address for KV transfers"
        return [engine, Finding(url, "connector", Status.FAIL, found, advice)]
    asked = [_connector(url, {**one, "describe": True}, ask, connect, greet) for one in known]
    return [engine, *(finding for findings in asked for finding in findings)]


def _version(url: str, ask: Ask) -> Finding:
    try:
        version = str(json.loads(ask("/version", None))["version"])
    except (PeerError, ValueError, LookupError, TypeError) as error:
        return Finding(
            url,
            "vLLM",
            Status.WARN,
            repr_short(error),
            "is this URL a vLLM engine's, not a proxy's?",
        )
    return Finding(url, "vLLM", Status.OK, version)


def _transfers(url: str, ask: Ask) -> list[Finding]:
    """Whether KV arrives at an engine that fetches KV, and whether KV of a sending engine's GPU takes the short
    way."""
    try:
        metrics = ask("/metrics", None)
    except PeerError:
        return []
    outage, staged = outage_in(metrics), staged_in(metrics)
    findings = [Finding(url, "transfers", Status.FAIL, *outage)] if outage else []
    if staged:
        found = "KV of its GPU passes through host memory"
        findings.append(Finding(url, "slots", Status.OK, found, staged))
    return findings


def _connector(url: str, params: Any, ask: Ask, connect: Connect, greet: Greet) -> list[Finding]:
    if not isinstance(params, dict) or not params.get("describe"):
        return [_without_address(url, params, ask)]
    host, port = str(params.get("remote_host")), params.get("remote_port")
    ours = Finding(url, "connector", Status.OK, f"PDConnector, control port {host}:{port}")
    name = "control port"
    if is_loopback(host) and not is_loopback(urlsplit(url).hostname or ""):
        return [
            ours,
            Finding(
                url,
                name,
                Status.FAIL,
                f"the engine tells peers to dial {host}, which is themselves",
                f"start that engine with {HOST_VARIABLE} set to its address and {KEY_VARIABLE} set",
            ),
        ]
    failure = connect(host, port) if isinstance(port, int) else f"{port!r} is not a port"
    if failure or not isinstance(port, int):
        return [
            ours,
            Finding(
                url,
                name,
                Status.FAIL,
                f"{host}:{port}: {failure}",
                f"does {HOST_VARIABLE} of that engine name an address this host reaches? "
                "Let its TCP ports through the firewall",
            ),
        ]
    if problem := greet(host, port):
        return [ours, Finding(url, name, Status.FAIL, *problem)]
    accepts = f"{host}:{port} accepts connections and the key from here"
    return [ours, Finding(url, name, Status.OK, accepts), *_ports(url, params)]


def _ports(url: str, params: Mapping[str, Any]) -> list[Finding]:
    """The ports to open for decode engines on other machines."""
    ranks, data = params.get("remote_ranks"), params.get("data_ports")
    control = [rank[1] for rank in ranks if len(rank) > 1] if isinstance(ranks, list) else []
    ports = sorted({port for port in [*control, *(data or ())] if isinstance(port, int)})
    if not ports or is_loopback(str(params.get("remote_host"))):
        return []
    shown = ", ".join(map(str, ports))
    advice = f"let decode engines reach TCP {shown} there"
    if any(port >= FIRST_CHOSEN for port in ports):
        advice += "; the system chose them, and chooses others at the next start: set control_port and data_port"
    return [Finding(url, "ports", Status.OK, f"TCP {shown}", advice)]


def _without_address(url: str, params: Any, ask: Ask) -> Finding:
    """A decode engine has no control port. An engine without PDConnector does not have its metrics."""
    try:
        ours = "pd_connector:" in ask("/metrics", None)
    except PeerError:
        ours = False
    if ours:
        found = "PDConnector, no control port: decode only (kv_consumer), which dials and is not dialled"
        return Finding(url, "connector", Status.OK, found)
    found = "another connector" if params else "no KV connector"
    return Finding(
        url,
        "connector",
        Status.FAIL,
        f"{found} answers there",
        'start it with --kv-transfer-config \'{"kv_connector": "PDConnector", "kv_role": "kv_producer"}\'',
    )


def repr_short(error: Exception) -> str:
    """An error in one line: its message, or its type if there is no message."""
    text = str(error) if isinstance(error, PeerError) else f"unexpected answer ({error!r})"
    return text[:300]


def asker(url: str, api_key: str | None) -> Ask:
    """A function that asks over HTTP. Proxy variables are for the internet; engines are dialled directly."""
    opener = build_opener(ProxyHandler({}))
    base = url.rstrip("/").removesuffix("/v1")

    def ask(path: str, body: Mapping[str, Any] | None) -> str:
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(base + path, data, headers)
            limit_s = TIMEOUT_S if body is None else DESCRIBE_TIMEOUT_S
            with opener.open(request, timeout=limit_s) as response:
                return str(response.read().decode(errors="replace"))
        except HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise PeerError(f"{path} was answered with status {error.code}: {said}") from None
        except URLError as error:
            raise PeerError(f"{path}: {error.reason}") from None
        except (OSError, ValueError) as error:
            raise PeerError(f"{path}: {error}") from None

    return ask


def connect(host: str, port: int) -> str:
    """See `Connect`."""
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)
