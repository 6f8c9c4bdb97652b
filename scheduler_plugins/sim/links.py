# SPDX-License-Identifier: Apache-2.0
"""KV on its way between simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

Done = Callable[[float], None]
"""Called with the time at which the last byte has arrived."""


_ENDED_BYTES = 1.0
"""A transfer with fewer bytes left has ended."""
_SPARE_S = 10.0
"""What a NIC could have sent longer ago than this does not count for KV that streams during a prefill."""


class Place(NamedTuple):
    """Where an engine runs. Empty: nothing else is there."""

    device: str = ""
    node: str = ""
    rack: str = ""
    nic_bytes_per_s: float = inf
    """Rate of the node's NIC in each direction. All engines of the node share it."""


NOWHERE = Place()
_Key = tuple[str, str]
"""What transfers share: a name and a direction."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Properties of the links between engines."""

    bytes_per_s: float = 25e9
    """Rate of each engine's link, in each direction: 200 Gbit/s."""
    device_bytes_per_s: float = 1e12
    """Rate of an engine's transfers to engines of the same device."""
    node_bytes_per_s: float = 200e9
    """The same to engines of the same node: NVLink, shared memory."""
    rack_bytes_per_s: float = inf
    """The same to engines of the same rack. `bytes_per_s` is the most."""
    other_bytes_per_s: float = inf
    """The same to engines of other racks. `bytes_per_s` is the most."""
    latency_s: float = 2e-3
    """Time from the order to the first byte, and travel time of the last byte."""
    kv_bytes_per_token: float = 131_072
    """KV of one token on the wire. Llama 3 8B in bf16 has 128 KiB."""
    layers: int = 32
    overlap: bool = True
    """Whether KV streams during the prefill. If so, the wait is only for the part that the prefill's time does not
    cover, and at least for the last layer."""

    def __post_init__(self) -> None:
        """Raises: ValueError: naming the setting, the value found and the value wanted."""
        for name in ("", "device_", "node_", "rack_", "other_"):
            if not (value := getattr(self, f"{name}bytes_per_s")) > 0:
                raise ValueError(f"{name}bytes_per_s {value}: must be above 0")
            if value == inf and name not in ("rack_", "other_"):  # the clock would stand still
                raise ValueError(f"{name}bytes_per_s {value}: must be a rate, such as 1e15")
        for name in ("latency_s", "kv_bytes_per_token"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise ValueError(f"{name} {value}: must be a number from 0 on")

    def exposed_bytes(self, tokens: int, prefill_s: float, rate: float | None = None) -> float:
        """Bytes left to send after a prefill of `prefill_s`. `rate`: of the pair; None: `bytes_per_s`."""
        size = tokens * self.kv_bytes_per_token
        if not self.overlap:
            return size
        rate = self.bytes_per_s if rate is None else rate
        return max(size / self.layers, size - prefill_s * rate)

    def pair_rate(self, source: Place, target: Place) -> tuple[str, float]:
        """The kind of a pair (`device`, `node`, `rack`, `other`), and the rate of an engine's transfers of this
        kind."""
        if source.node and source.node == target.node:
            if source.device and source.device == target.device:
                return "device", self.device_bytes_per_s
            return "node", self.node_bytes_per_s
        if source.rack and source.rack == target.rack:
            return "rack", min(self.bytes_per_s, self.rack_bytes_per_s)
        if source.node and target.node:
            return "other", min(self.bytes_per_s, self.other_bytes_per_s)
        return "other", self.bytes_per_s


@dataclass(eq=False, slots=True)
class _Flow:
    source: str
    target: str
    path: Mapping[_Key, float]  # what it shares with others, with its rate
    left: float  # bytes
    done: Done
    rate: float = field(default=0.0)  # bytes a second

    def ended(self, now_s: float) -> bool:
        """Whether the last byte has left, as far as the clock can tell. Late in a long trace, on a fast link, it cannot
        resolve the time of some bytes."""
        return self.left <= _ENDED_BYTES or now_s + self.left / self.rate <= now_s


class Links:
    """Transfers that share links max-min fairly: the source's outgoing link, the target's incoming link, and the NICs of
    their nodes.

    Inside a node an engine has a link of its own for each kind of pair, and needs no NIC. A NIC never carries more than
    its rate, KV that streams during prefills included (`exposed_bytes`).
    """

    def __init__(self, network: Network, rates: Mapping[str, float] | None = None) -> None:
        """`rates`: bytes a second, in each direction, of ends that are not engines."""
        self.network = network
        self._rates = rates or {}
        self._places: dict[str, Place] = {}
        self._paths: dict[tuple[str, str], Mapping[_Key, float]] = {}
        self._flows: list[_Flow] = []
        self._nics: dict[_Key, float] = {}  # their rates
        self._spare: dict[
            _Key, float
        ] = {}  # bytes that a NIC could have carried lately, and did not
        self._now_s = 0.0
        self.next_event_s = inf
        """When the first transfer ends."""
        self.moved_bytes = 0
        """Bytes sent so far."""

    def place(self, engine: str, place: Place) -> None:
        """Say where an engine runs. Engines without a place have a node of their own."""
        self._places[engine] = place
        self._paths.clear()

    def start(self, source: str, target: str, size: float, now_s: float, done: Done) -> None:
        """Begin to move `size` bytes. `done` is called by `advance`."""
        self._pass(now_s)
        self.moved_bytes += int(size)
        self._flows.append(_Flow(source, target, self._path(source, target), size, done))
        self._share()

    def advance(self, now_s: float) -> None:
        """End the transfers whose last byte has left at `now_s`, which is `next_event_s`."""
        self._pass(now_s)
        ended = [flow for flow in self._flows if flow.ended(now_s)]
        self._flows = [flow for flow in self._flows if not flow.ended(now_s)]
        self._share()
        for flow in ended:
            flow.done(now_s)

    def drop(self, engine: str) -> None:
        """Drop the transfers of an engine that died."""
        self._flows = [flow for flow in self._flows if engine not in (flow.source, flow.target)]
        self._share()

    def estimate_s(self, source: str, target: str, tokens: int) -> float:
        """Time to move the KV of `tokens` tokens if the running transfers stay."""
        path, network = self._path(source, target), self.network
        rate = min(
            rate / (1 + sum(key in flow.path for flow in self._flows)) for key, rate in path.items()
        )
        return network.latency_s + tokens * network.kv_bytes_per_token / rate

    def exposed_bytes(
        self, source: str, target: str, tokens: int, prefill_s: float, now_s: float
    ) -> float:
        """Bytes left to send after a prefill of `prefill_s`. During it, KV had what the pair's link can carry, and what
        the NICs had to spare."""
        network, path = self.network, self._path(source, target)
        size = tokens * network.kv_bytes_per_token
        left = network.exposed_bytes(tokens, prefill_s, min(path.values()))
        if nics := [key for key in path if key in self._nics]:
            self._pass(now_s)
            spare = (min(self._spare[key], self._nics[key] * prefill_s) for key in nics)
            hidden = min(size - left, *spare)
            for key in nics:
                self._spare[key] -= hidden
            left = size - hidden
        return left

    def _path(self, source: str, target: str) -> Mapping[_Key, float]:
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = self._new_path(source, target)
        return path

    def _new_path(self, source: str, target: str) -> Mapping[_Key, float]:
        ends = [self._places.get(end, NOWHERE) for end in (source, target)]
        kind, rate = self.network.pair_rate(*ends)
        path, inside = dict[_Key, float](), kind in ("device", "node")
        for name, end, way in zip((source, target), ends, ("out", "in"), strict=True):
            path[f"{name} {kind}" if inside else name, way] = self._rates.get(name, rate)
            if not inside and end.node and end.nic_bytes_per_s < inf:
                key = (f"NIC of {end.node}", way)
                path[key] = self._nics[key] = end.nic_bytes_per_s
        return path

    def _pass(self, now_s: float) -> None:
        elapsed_s = now_s - self._now_s
        for flow in self._flows:
            flow.left -= flow.rate * elapsed_s
        for key, rate in self._nics.items():
            spare = max(0.0, rate - sum(flow.rate for flow in self._flows if key in flow.path))
            self._spare[key] = min(rate * _SPARE_S, self._spare.get(key, 0.0) + spare * elapsed_s)
        self._now_s = now_s

    def _share(self) -> None:
        """Give every transfer its rate. The most contended link is first; the other links share the rest."""
        flows = self._flows
        if len(flows) == 1:
            flows[0].rate = min(flows[0].path.values())
        elif flows:
            _share_fairly(flows)
        self.next_event_s = min(
            (self._now_s + max(0.0, flow.left) / flow.rate for flow in flows), default=inf
        )


def _share_fairly(flows: list[_Flow]) -> None:
    links: dict[_Key, list[_Flow]] = {}
    room: dict[_Key, float] = {}
    for flow in flows:
        room.update(flow.path)
        for link in flow.path:
            links.setdefault(link, []).append(flow)
    waiting = set(flows)
    while waiting:
        share, tightest = min(
            ((room[link] / len(using), link) for link, using in links.items() if using),
            key=lambda pair: pair[0],
        )
        for flow in list(links[tightest]):
            flow.rate = max(share, 1e-6)  # rounding must not leave nothing
            waiting.discard(flow)
            for link in flow.path:
                links[link].remove(flow)
                room[link] -= share
