# SPDX-License-Identifier: Apache-2.0
"""An engine or a router elsewhere: whether it is up, uses PDConnector, and has a control port that is reachable from here."""

import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pd_connector.config import HOST_VARIABLE, KEY_VARIABLE
from pd_connector.hosts import is_loopback
from pd_connector.protocol.wire import about
from pd_connector.remedies import outage_in, staged_in
from pd_connector.tools.cli.checks import router, together
from pd_connector.tools.cli.checks.asking import TIMEOUT_S, Ask, PeerError, json_of
from pd_connector.tools.cli.checks.finding import Finding, Status
from pd_connector.tools.cli.checks.together import EngineReport

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
    report: EngineReport | None = None  # None: not an engine with PDConnector


def check(url: str, ask: Ask, connect: Connect, greet: Greet) -> Visit:
    """All findings about one peer. Each needs the finding before it."""
    try:
        health = ask("/health", None)
    except PeerError as error:
        if (
            routing := router.state_in(error.body)
        ) is not None:  # it says 503 while no engine serves
            return Visit(router.check(url, routing))
        advice = (
            "is the engine up, and does it listen on an address of this network "
            "(--host 0.0.0.0)? Is a firewall between? The URL is the engine's, not its control port"
        )
        advised = "" if str(error).endswith("?") else advice  # the error asks what to look at
        return Visit([Finding(url, "reachable", Status.FAIL, str(error), advised)])
    reachable = Finding(url, "reachable", Status.OK, "healthy")
    if (routing := router.state_in(health)) is not None:
        return Visit([reachable, *router.check(url, routing)])
    if (state := _sglang(ask)) is not None:
        findings = [*_sglang_findings(url, state, ask, connect, greet), *_transfers(url, ask)]
        return Visit([reachable, *findings], _sglang_report(url, state, ask))
    findings = [reachable, _version(url, ask)]
    try:
        card = _card(ask)
        model = str(card["id"])
        answer = json_of(
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
    report = _vllm_report(url, params, card, ask)
    if report is not None:
        findings += together.schema(url, about.own(), report.about)
    findings += [*_connector(url, params, ask, connect, greet), *_transfers(url, ask)]
    return Visit(findings, report)


def _card(ask: Ask) -> Mapping[str, Any]:
    """An engine's report about its first model. Raises as `ask` and the types of JSON do."""
    card: Mapping[str, Any] = json_of(ask("/v1/models", None))["data"][0]
    return card


def _context(card: Mapping[str, Any]) -> int:
    """Most tokens of a prompt and its answer together; 0 if the engine does not report it."""
    said = card.get("max_model_len")
    return said if isinstance(said, int) else 0


def _vllm_report(url: str, params: Any, card: Mapping[str, Any], ask: Ask) -> EngineReport | None:
    """What a vLLM engine says of itself; None without PDConnector."""
    produces = isinstance(params, dict) and bool(params.get("describe"))
    ours = produces or (isinstance(params, dict) and about.FIELD in params) or _has_metrics(ask)
    if not ours:
        return None
    model = str(card["id"])
    return EngineReport(
        url, about.read(params), produces, model, _tokens(ask, model), _context(card)
    )


def _sglang_report(url: str, server_info: dict[str, Any], ask: Ask) -> EngineReport | None:
    """An SGLang engine's report about itself; None without PDConnector."""
    states = _states(server_info)
    model = str(server_info.get("served_model_name") or server_info.get("model_path"))
    produces = server_info["disaggregation_mode"] == "prefill"
    if not states:
        return None
    try:
        context = _context(_card(ask))
    except (PeerError, ValueError, LookupError, TypeError, AttributeError):
        context = 0
    return EngineReport(url, about.read(states[0]), produces, model, _tokens(ask, model), context)


def _tokens(ask: Ask, model: str) -> tuple[object, ...]:
    """Token ids that the engine's tokenizer makes of a test text and a test chat; None if the engine does not return
    them."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SAMPLE}]
    tokenized: list[object] = []
    for question in ({"prompt": SAMPLE}, {"messages": chat}):
        try:
            answer = json_of(ask("/tokenize", {"model": model, **question}))
            tokenized.append(answer.get("tokens"))
        except (PeerError, ValueError, LookupError, AttributeError):
            tokenized.append(None)
    return tuple(tokenized)


def _sglang(ask: Ask) -> dict[str, Any] | None:
    """An SGLang engine's state; None for another engine."""
    try:
        server_info = json_of(ask("/server_info", None))
    except (PeerError, ValueError):
        return None
    return (
        server_info
        if isinstance(server_info, dict) and "disaggregation_mode" in server_info
        else None
    )


def _sglang_findings(
    url: str, server_info: dict[str, Any], ask: Ask, connect: Connect, greet: Greet
) -> list[Finding]:
    """SGLang is not sent a prompt: it would refuse one without a bootstrap room."""
    mode, backend = (
        server_info["disaggregation_mode"],
        server_info.get("disaggregation_transfer_backend"),
    )
    states = _states(server_info)
    engine = [Finding(url, "SGLang", Status.OK, f"{server_info.get('version', '?')}, {mode}")]
    if states:
        engine += together.schema(url, about.own(), about.read(states[0]))
    if mode not in ("prefill", "decode") or backend != BACKEND:
        text = f"disaggregation mode {mode}, transfer backend {backend}"
        advice = (
            "start it with --disaggregation-mode prefill (or decode) and "
            f"--disaggregation-transfer-backend {BACKEND}"
        )
        return [*engine, Finding(url, "connector", Status.FAIL, text, advice)]
    if mode == "decode":
        text = "PDConnector, no control port: a decode engine dials and is not dialled"
        return [*engine, Finding(url, "connector", Status.OK, text)]
    if not states:
        advice = "see that engine's log: pd_connector says there why it was not registered"
        text = "its state has no address for KV transfers"
        return [*engine, Finding(url, "connector", Status.FAIL, text, advice)]
    by_rank = [
        _connector(url, {**state, "describe": True}, ask, connect, greet) for state in states
    ]
    return [*engine, *(finding for findings in by_rank for finding in findings)]


def _states(server_info: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank of an SGLang engine with PDConnector says."""
    states = server_info.get("internal_states")
    listed = states if isinstance(states, list) else []
    ours = [state.get(BACKEND) for state in listed if isinstance(state, dict)]
    return [state for state in ours if isinstance(state, dict) and state]


def _version(url: str, ask: Ask) -> Finding:
    try:
        version = str(json_of(ask("/version", None))["version"])
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
    """Whether KV arrives at an engine that fetches KV, and whether a sending engine's KV passes directly from its
    GPU."""
    try:
        metrics = ask("/metrics", None)
    except PeerError:
        return []
    outage, staged = outage_in(metrics), staged_in(metrics)
    findings = [Finding(url, "transfers", Status.FAIL, *outage)] if outage else []
    if staged:
        text = "KV of its GPU passes through host memory"
        findings.append(Finding(url, "slots", Status.OK, text, staged))
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
    listed = ranks if isinstance(ranks, list) else []
    control = [rank[1] for rank in listed if isinstance(rank, list) and len(rank) > 1]
    own = data if isinstance(data, list) else []
    ports = sorted({port for port in [*control, *own] if isinstance(port, int)})
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
        text = "PDConnector, no control port: decode only (kv_consumer), which dials and is not dialled"
        return Finding(url, "connector", Status.OK, text)
    text = "another connector" if params else "no KV connector"
    return Finding(
        url,
        "connector",
        Status.FAIL,
        f"{text} answers there",
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
    except (
        OSError,
        UnicodeError,
        OverflowError,
    ) as error:  # a peer can say anything
        return getattr(error, "strerror", None) or str(error)
