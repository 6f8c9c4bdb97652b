# SPDX-License-Identifier: Apache-2.0
"""An engine's state as `/health` and the admin API show it."""

from __future__ import annotations

from typing import Any

from scheduler_plugins.router.engines.engine import BackendEngine


def described(engine: BackendEngine) -> dict[str, Any]:
    """The engine's state as `/health` shows it."""
    state: dict[str, Any] = {
        "url": engine.url,
        "role": engine.role,
        "state": "up" if engine.up else "down",
        "in_flight": engine.in_flight,
    }
    if engine.kind is not None:
        state["kind"] = engine.kind
    elif not engine.role_given:
        state["role"] = "unknown"
    state |= {name: said for name, said in engine.about._asdict().items() if said}
    if engine.hands_over:
        state["hands_over_kv"] = engine.address is not None
    state |= engine.role_state.describe(engine.role)
    if engine.handoffs:
        state["handoffs"] = engine.handoffs
    if engine.draining:
        state["draining"] = True
    if engine.circuit.cause:
        state["circuit"] = engine.circuit.cause
    if engine.reason:
        state["reason"] = engine.reason
    if engine.warning:
        state["warning"] = engine.warning
    return state
