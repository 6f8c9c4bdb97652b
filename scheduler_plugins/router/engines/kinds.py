# SPDX-License-Identifier: Apache-2.0
"""Kinds of engines: how to tell them apart, and what each needs to hand KV over."""

import json
from enum import StrEnum
from typing import Any, NamedTuple

from pd_connector.protocol.wire.params import ProducerAddress, parse_address
from scheduler_plugins.router.engines.about import MOST_CHARACTERS

SERVER_INFO = "/server_info"
SWITCH_ROLE = "/pd_role_switch"
_BACKEND = "pd_connector"
"""SGLang's name for our transfer backend. Its engines report their address under this name."""


class Kind(StrEnum):
    """The engine's software."""

    VLLM = "vllm"
    SGLANG = "sglang"


class SglangFacts(NamedTuple):
    """Facts that an SGLang engine reports.

    Attributes:
        mode: `prefill`, `decode`, or `null` for an engine outside a pair.
        model: the name under which it serves its model.
        replicas: handover addresses of a prefill engine with our backend, one a data-parallel
            replica.
        bootstrap_port: port where an SGLang decode engine looks up a prefill engine's ranks.
        switches: whether it changes its side on request.
        tells_side: whether `mode` is its present side. Without our backend, `mode` is the side on
            which it was started.
        started: the side on which it was started.
        version: version of SGLang; empty: not reported.
    """

    mode: str
    model: str
    replicas: tuple[ProducerAddress, ...]
    bootstrap_port: int | None
    switches: bool = False
    tells_side: bool = False
    started: str = ""
    version: str = ""

    @property
    def whole(self) -> bool:
        """Whether the engine works alone."""
        return self.mode == "null"


class Bootstrap(NamedTuple):
    """SGLang's names for a prefill engine and a transfer."""

    host: str
    port: int
    room: int

    def fields(self) -> dict[str, object]:
        """The request fields that carry them."""
        return {
            "bootstrap_host": self.host,
            "bootstrap_port": self.port,
            "bootstrap_room": self.room,
        }


def _ours(states: object) -> list[dict[str, Any]]:
    """The states of ranks with our backend."""
    listed = states if isinstance(states, list) else []
    return [
        state
        for state in listed
        if isinstance(state, dict) and isinstance(state.get(_BACKEND), dict)
    ]


def sglang_facts(raw: bytes) -> SglangFacts | None:
    """The facts in an answer of `/server_info`; None if the answer is not SGLang's."""
    try:
        info = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(info, dict) or not isinstance(info.get("disaggregation_mode"), str):
        return None
    states = info.get("internal_states")
    addresses = [
        parse_address(state.get(_BACKEND)) if isinstance(state, dict) else None
        for state in (states if isinstance(states, list) else ())
    ]
    replicas = tuple(address for address in addresses if address is not None)
    sides = {str(state[_BACKEND]["side"]) for state in _ours(states) if "side" in state[_BACKEND]}
    port = info.get("disaggregation_bootstrap_port")
    model = info.get("served_model_name") or info.get("model_path")
    return SglangFacts(
        mode=next(iter(sides)) if len(sides) == 1 else info["disaggregation_mode"],
        tells_side=len(sides) == 1,
        started=info["disaggregation_mode"],
        model=str(model),
        replicas=replicas if len(replicas) == len(addresses) else (),
        bootstrap_port=port if isinstance(port, int) else None,
        switches=info.get("enable_pd_role_switch") is True,
        version=str(info.get("version") or "")[:MOST_CHARACTERS],
    )
