# SPDX-License-Identifier: Apache-2.0
"""Kinds of engines: how each is told apart, and what it needs in order to hand KV over."""

import json
from enum import StrEnum
from typing import NamedTuple

from pd_connector.protocol.params import ProducerAddress, parse_address

SERVER_INFO = "/server_info"
_BACKEND = "pd_connector"
"""SGLang's name of our transfer backend, under which its engines tell their address."""


class Kind(StrEnum):
    """Which engine answers."""

    VLLM = "vllm"
    SGLANG = "sglang"


class SglangFacts(NamedTuple):
    """What an SGLang engine says of itself.

    Attributes:
        mode: `prefill`, `decode`, or `null` for an engine that works alone.
        model: the name under which it serves its model.
        replicas: addresses of a prefill engine with our backend, one for each data-parallel replica.
        bootstrap_port: where a decode engine of SGLang's asks for a prefill engine's ranks.
    """

    mode: str
    model: str
    replicas: tuple[ProducerAddress, ...]
    bootstrap_port: int | None

    @property
    def whole(self) -> bool:
        """Whether it works alone."""
        return self.mode == "null"


class Bootstrap(NamedTuple):
    """How an SGLang engine names a prefill engine and a transfer."""

    host: str
    port: int
    room: int

    def fields(self) -> dict[str, object]:
        """As fields of a request."""
        return {
            "bootstrap_host": self.host,
            "bootstrap_port": self.port,
            "bootstrap_room": self.room,
        }


def sglang_facts(raw: bytes) -> SglangFacts | None:
    """The facts in an answer of `/server_info`; None where it is not SGLang's."""
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or not isinstance(told.get("disaggregation_mode"), str):
        return None
    states = told.get("internal_states")
    addresses = [
        parse_address(state.get(_BACKEND)) if isinstance(state, dict) else None
        for state in (states if isinstance(states, list) else ())
    ]
    replicas = tuple(address for address in addresses if address is not None)
    port = told.get("disaggregation_bootstrap_port")
    model = told.get("served_model_name") or told.get("model_path")
    return SglangFacts(
        mode=told["disaggregation_mode"],
        model=str(model),
        replicas=replicas if len(replicas) == len(addresses) else (),
        bootstrap_port=port if isinstance(port, int) else None,
    )
