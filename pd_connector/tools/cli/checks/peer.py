# SPDX-License-Identifier: Apache-2.0
"""An engine or a router elsewhere: whether it is up, uses PDConnector, and has a control port that is reachable from here."""

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pd_connector.config import HOST_VARIABLE, KEY_VARIABLE
from pd_connector.hosts import is_loopback
from pd_connector.protocol.wire import about
from pd_connector.remedies import outage_in, staged_in
from pd_connector.tools.cli.checks import router, together
from pd_connector.tools.cli.checks.asking import TIMEOUT_S, Ask, PeerError
from pd_connector.tools.cli.checks.finding import Finding, Status
from pd_connector.tools.cli.checks.together import Told

BACKEND = "pd_connector"
"""SGLang's name for our transfer backend."""
SAMPLE = "Hello, world! 1234567 na\u00efve \u4f60\u597d \U0001f642\n\tdef f(x): return [x]"
"""A text that tokenizers split in many ways."""
FIRST_CHOSEN = 32768
"""The first port that Linux gives to programs that ask for any."""
_DESCRIBE = {"do_remote_decode": True, "do_remote_prefill": False, "describe": True}

Connect = Callable[[str, int], str]
"""Open and close a TCP connection; returns why that failed, or an empty string."""
Greet = Callable[[str, int], tuple[str, str] | None]
"""Make the control channel's handshake; returns why it failed, and what to do (`handshake.greet`)."""


class Visit(NamedTuple):
    """What was found at one peer."""

    findings: list[Finding]
    told: Told | None = None  # None: not an engine with PDConnector


def check(url: str, ask: Ask, connect: Connect, greet: Greet) -> Visit:
    """All findings about one peer. Each needs the finding before it."""
    try:
        health = ask("/health", None)
    except PeerError as error:
        if (routing := router.told(error.body)) is not None:  # it says 503 while no engine serves
            return Visit(router.check(url, routing))
        advice = (
            "is the engine up, and does it listen on an address of this network "
            "(--host 0.0.0.0)? Is a firewall between? The URL is the engine's, not its control port"
        )
        advised = "" if str(error).endswith("?") else advice  # the error asks what to look at
        return Visit([Finding(url, "reachable", Status.FAIL, str(error), advised)])
    reachable = Finding(url, "reachable", Status.OK, "healthy")
    if (routing := router.told(health)) is not None:
        return Visit([reachable, *router.check(url, routing)])
    if (state := _sglang(ask)) is not None:
        findings = [*_sglang_findings(url, state, ask, connect, greet), *_transfers(url, ask)]
        return Visit([reachable, *findings], _sglang_told(url, state, ask))
    findings = [reachable, _version(url, ask)]
    try:
        card = _card(ask)
        model = str(card["id"])
        answer = json.loads(
            ask(
                "/v1/completions",
                {"model": model, "prompt": "a", "max_tokens": 1, "kv_transfer_params": _DESCRIBE},
            )
        )
        params = answer.get("kv_transfer_params")
    except (PeerError, ValueError, LookupError, TypeError, AttributeError) as error:
        advice = "the engine's own log says more"
        findings.append(Finding(url, "answers", Status.FAIL, repr_short(error), advice))
        return Visit(findings)
    findings.append(Finding(url, "answers", Status.OK, f"model {model}"))
    told = _vllm_told(url, params, card, ask)
    if told is not None:
        findings += together.schema(url, about.own(), told.about)
    findings += [*_connector(url, params, ask, connect, greet), *_transfers(url, ask)]
    return Visit(findings, told)


def _card(ask: Ask) -> Mapping[str, Any]:
    """What an engine says of its first model. Raises as `ask` and the types of JSON do."""
    found: Mapping[str, Any] = json.loads(ask("/v1/models", None))["data"][0]
    return found


def _context(card: Mapping[str, Any]) -> int:
    """Tokens of the longest prompt with its answer; 0 where the engine does not say."""
    said = card.get("max_model_len")
    return said if isinstance(said, int) else 0


def _vllm_told(url: str, params: Any, card: Mapping[str, Any], ask: Ask) -> Told | None:
    """What a vLLM engine says of itself; None without PDConnector."""
    produces = isinstance(params, dict) and bool(params.get("describe"))
    ours = produces or (isinstance(params, dict) and about.FIELD in params) or _has_metrics(ask)
    if not ours:
        return None
    model = str(card["id"])
    return Told(url, about.read(params), produces, model, _tokens(ask, model), _context(card))


def _sglang_told(url: str, told: dict[str, Any], ask: Ask) -> Told | None:
    """What an SGLang engine says of itself; None without PDConnector."""
    states = _states(told)
    model = str(told.get("served_model_name") or told.get("model_path"))
    produces = told["disaggregation_mode"] == "prefill"
    if not states:
        return None
    try:
        context = _context(_card(ask))
    except (PeerError, ValueError, LookupError, TypeError, AttributeError):
        context = 0
    return Told(url, about.read(states[0]), produces, model, _tokens(ask, model), context)


def _tokens(ask: Ask, model: str) -> tuple[object, ...]:
    """What the engine's tokenizer makes of a text and of a chat; None where it does not say."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SAMPLE}]
    found: list[object] = []
    for question in ({"prompt": SAMPLE}, {"messages": chat}):
        try:
            told = json.loads(ask("/tokenize", {"model": model, **question}))
            found.append(told.get("tokens"))
        except (PeerError, ValueError, LookupError, AttributeError):
            found.append(None)
    return tuple(found)


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
    states = _states(told)
    engine = [Finding(url, "SGLang", Status.OK, f"{told.get('version', '?')}, {mode}")]
    if states:
        engine += together.schema(url, about.own(), about.read(states[0]))
    if mode not in ("prefill", "decode") or backend != BACKEND:
        found = f"disaggregation mode {mode}, transfer backend {backend}"
        advice = (
            "start it with --disaggregation-mode prefill (or decode) and "
            f"--disaggregation-transfer-backend {BACKEND}"
        )
        return [*engine, Finding(url, "connector", Status.FAIL, found, advice)]
    if mode == "decode":
        found = "PDConnector, no control port: a decode engine dials and is not dialled"
        return [*engine, Finding(url, "connector", Status.OK, found)]
    if not states:
        advice = "see that engine's log: pd_connector says there why it was not registered"
        found = "its state has no address for KV transfers"
        return [*engine, Finding(url, "connector", Status.FAIL, found, advice)]
    asked = [_connector(url, {**one, "describe": True}, ask, connect, greet) for one in states]
    return [*engine, *(finding for findings in asked for finding in findings)]


def _states(told: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank of an SGLang engine with PDConnector says."""
    states = told.get("internal_states")
    listed = states if isinstance(states, list) else []
    ours = [one.get(BACKEND) for one in listed if isinstance(one, dict)]
    return [one for one in ours if isinstance(one, dict) and one]


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
    if _has_metrics(ask):
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


def _has_metrics(ask: Ask) -> bool:
    """Whether the engine has metrics of PDConnector."""
    try:
        return "pd_connector:" in ask("/metrics", None)
    except PeerError:
        return False


def repr_short(error: Exception) -> str:
    """An error in one line: its message, or its type if there is no message."""
    text = str(error) if isinstance(error, PeerError) else f"unexpected answer ({error!r})"
    return text[:300]


def connect(host: str, port: int) -> str:
    """See `Connect`."""
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)
