# SPDX-License-Identifier: Apache-2.0
"""KV on its way between simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

Done = Callable[[float], None]
"""Called with the time at which the last byte has arrived."""


_ENDED_BYTES = 1.0
"""A transfer with fewer bytes left has ended."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Properties of the links between engines."""

    bytes_per_s: float = 25e9
    """Rate of each engine's link, in each direction: 200 Gbit/s."""
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
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s {self.bytes_per_s}: must be above 0")
        for name in ("latency_s", "kv_bytes_per_token"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise ValueError(f"{name} {value}: must be a number from 0 on")

    def exposed_bytes(self, tokens: int, prefill_s: float) -> float:
        """Bytes left to send after a prefill of `prefill_s`."""
        size = tokens * self.kv_bytes_per_token
        if not self.overlap:
            return size
        return max(size / self.layers, size - prefill_s * self.bytes_per_s)


@dataclass(eq=False, slots=True)
class _Flow:
    source: str
    target: str
    left: float  # bytes
    done: Done
    rate: float = field(default=0.0)  # bytes a second

    def ended(self, now_s: float) -> bool:
        """Whether the last byte has left, as far as the clock can tell. Late in a long trace, on a fast link, it cannot
        resolve the time of some bytes."""
        return self.left <= _ENDED_BYTES or now_s + self.left / self.rate <= now_s


class Links:
    """Transfers that share links max-min fairly, by the source's outgoing link and the target's incoming link."""

    def __init__(self, network: Network, rates: Mapping[str, float] | None = None) -> None:
        """`rates`: bytes a second, in each direction, of ends that are not engines."""
        self.network = network
        self._rates = rates or {}
        self._flows: list[_Flow] = []
        self._now_s = 0.0
        self.next_event_s = inf
        """When the first transfer ends."""
        self.moved_bytes = 0
        """Bytes sent so far."""

    def start(self, source: str, target: str, size: float, now_s: float, done: Done) -> None:
        """Begin to move `size` bytes. `done` is called by `advance`."""
        self._pass(now_s)
        self.moved_bytes += int(size)
        self._flows.append(_Flow(source, target, size, done))
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
        sharing = 1 + max(
            sum(flow.source == source for flow in self._flows),
            sum(flow.target == target for flow in self._flows),
        )
        network = self.network
        size = tokens * network.kv_bytes_per_token
        return network.latency_s + size * sharing / min(self._rate(source), self._rate(target))

    def _rate(self, name: str) -> float:
        return self._rates.get(name, self.network.bytes_per_s)

    def _pass(self, now_s: float) -> None:
        elapsed_s = now_s - self._now_s
        for flow in self._flows:
            flow.left -= flow.rate * elapsed_s
        self._now_s = now_s

    def _share(self) -> None:
        """Give every transfer its rate. The most contended link is first; the other links share the rest."""
        flows = self._flows
        if len(flows) == 1:
            flows[0].rate = min(self._rate(flows[0].source), self._rate(flows[0].target))
        elif flows:
            _share_fairly(flows, self._rate)
        self.next_event_s = min(
            (self._now_s + max(0.0, flow.left) / flow.rate for flow in flows), default=inf
        )


def _share_fairly(flows: list[_Flow], rate_of: Callable[[str], float]) -> None:
    links: dict[tuple[str, bool], list[_Flow]] = {}
    for flow in flows:
        links.setdefault((flow.source, True), []).append(flow)
        links.setdefault((flow.target, False), []).append(flow)
    room = {link: rate_of(link[0]) for link in links}
    waiting = set(flows)
    while waiting:
        share, tightest = min(
            ((room[link] / len(using), link) for link, using in links.items() if using),
            key=lambda pair: pair[0],
        )
        for flow in list(links[tightest]):
            flow.rate = share
            waiting.discard(flow)
            for link in ((flow.source, True), (flow.target, False)):
                links[link].remove(flow)
                room[link] -= share
