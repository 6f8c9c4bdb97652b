# SPDX-License-Identifier: Apache-2.0
"""Who is compared: connectors with their configs, and what is asked of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pd_connector.tools.bench.flow import Flow, together, two_steps
from pd_connector.tools.bench.report import Param

Setting = str | int | float | bool | Sequence[str]


@dataclass(frozen=True)
class Contender:
    """A connector with its config.

    Args:
        name: what a person calls it.
        connector: vLLM's name of it.
        config: its own config (`kv_connector_extra_config`).
        params: what tells it from the others, for the report.
        bars: from this many prompt tokens on (key), a handoff may take at most this share of the
            baseline's (value).
        flow: how its requests are sent.
    """

    name: str
    connector: str
    config: Mapping[str, Setting] = field(default_factory=dict)
    params: Mapping[str, Param] = field(default_factory=dict)
    bars: Mapping[int, float] = field(default_factory=dict)
    flow: Flow = two_steps

    def bar(self, tokens: int) -> float | None:
        """The bar for prompts of this length; None where nothing is asked."""
        reached = [start for start in self.bars if start <= tokens]
        return self.bars[max(reached)] if reached else None


BASELINE = Contender("NixlConnector", "NixlConnector")

_RAW: Mapping[int, float] = {0: 0.97}
_HALF: Mapping[int, float] = {0: 0.65, 2048: 0.55}
_STREAMED: Mapping[int, float] = {2048: 0.30}


def _over_link(codec: str, overlap: str, bars: Mapping[int, float]) -> Contender:
    streams = overlap != "off"
    return Contender(
        f"{codec}+overlap" if streams else codec,
        "PDConnector",
        # Shared memory would pass by the link.
        {"transports": ["tcp"], "codec": codec, "overlap": overlap},
        {"codec": codec, "overlap": overlap},
        bars,
        together if streams else two_steps,
    )


def _on_one_machine(transport: str) -> Contender:
    config = {"transports": [transport]}
    return Contender(transport, "PDConnector", config, {"transport": transport}, {3500: 1.0})


def _by_name(*contenders: Contender) -> Mapping[str, Contender]:
    return MappingProxyType({contender.name: contender for contender in contenders})


LINK = _by_name(
    _over_link("raw", "off", _RAW),
    _over_link("fp8_e4m3", "off", _HALF),
    _over_link("int8", "off", _HALF),
    _over_link("raw", "auto", _STREAMED),
    _over_link("fp8_e4m3", "auto", _STREAMED),
    _over_link("int8", "auto", _STREAMED),
)
"""Ours over a link between two namespaces."""
LINK_DEFAULT = tuple(LINK)

LOCAL = _by_name(*map(_on_one_machine, ("shm", "tcp", "nixl")))
"""Ours on one machine."""
LOCAL_DEFAULT = ("shm",)
