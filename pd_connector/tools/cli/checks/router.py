# SPDX-License-Identifier: Apache-2.0
"""A router of ours, by what its `/health` says."""

from collections.abc import Mapping
from typing import Any

from pd_connector.tools.cli.checks.asking import json_of
from pd_connector.tools.cli.checks.finding import Finding, Status


def state_in(health: str) -> Mapping[str, Any] | None:
    """What a router says; None for an engine."""
    try:
        state = json_of(health)
    except ValueError:
        return None
    ours = isinstance(state, dict) and "disaggregates" in state
    return state if ours and isinstance(state.get("engines"), list) else None


def check(url: str, health: Mapping[str, Any]) -> list[Finding]:
    """All findings about a router: whether it hands KV over, and each engine that does not serve well."""
    engines = [engine for engine in health["engines"] if isinstance(engine, dict)]
    roles = ", ".join(f"{_count(engines, role)} {role}" for role in ("prefill", "decode"))
    if health["disaggregates"]:
        first = Finding(url, "router", Status.OK, f"pd-router; hands KV over; {roles}")
    else:
        advice = "it needs one engine of each role that is up and answers as PDConnector: see below"
        first = Finding(url, "router", Status.FAIL, f"pd-router; hands no KV over; {roles}", advice)
    deaf = [_events(url, engine, ports) for engine in engines if (ports := _unreachable(engine))]
    return [first, *(_engine(url, engine) for engine in engines if _complaint(engine)), *deaf]


def _unreachable(engine: Mapping[str, Any]) -> list[str]:
    """Addresses of the engine's KV events that the router cannot reach."""
    cache = engine.get("cache")
    whole = cache if isinstance(cache, dict) else {}
    ranks = whole.get("ranks")
    parts = [whole, *(ranks.values() if isinstance(ranks, dict) else ())]
    return [
        str(part["unreachable"])
        for part in parts
        if isinstance(part, dict) and "unreachable" in part
    ]


def _events(url: str, engine: Mapping[str, Any], ports: list[str]) -> Finding:
    problem = (
        f"the router cannot reach {', '.join(ports)}: it learns nothing of this engine's cache"
    )
    advice = (
        "open the port; start vLLM with --kv-events-config, or name the right address with --kv-events "
        "(docs/router.md#with-kv-events)"
    )
    name = f"KV events of {engine.get('url')}"
    return Finding(url, name, Status.WARN, problem, advice)


def _engine(url: str, engine: Mapping[str, Any]) -> Finding:
    name = f"{engine.get('role')} {engine.get('url')}"
    complaint, _, advice = _complaint(engine).partition(". What to do: ")
    up = engine.get("state") == "up" and not engine.get("warning")
    status = Status.WARN if up else Status.FAIL
    see = advice or f"pd-connector doctor --peer {engine.get('url')}"
    return Finding(url, name, status, complaint, see)


def _complaint(engine: Mapping[str, Any]) -> str:
    """What is wrong with an engine; empty if nothing is."""
    if engine.get("state") != "up":
        return str(engine.get("reason") or f"it is {engine.get('state')}")
    if engine.get("role") == "prefill" and engine.get("hands_over_kv") is False:
        return str(engine.get("reason") or "it does not say its address: no KV comes from it")
    return str(engine.get("warning") or "")


def _count(engines: list[dict[str, Any]], role: str) -> int:
    return sum(engine.get("role") == role for engine in engines)
