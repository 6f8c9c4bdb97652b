# SPDX-License-Identifier: Apache-2.0
"""KV on its way between simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

Done = Callable[[float], None]
"""Called with the time at which the last byte has arrived."""


_ENDED_BYTES = 1.0
"""A transfer with less left has ended. A clock at some thousand seconds cannot tell less apart."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """What the links between engines are like."""

    bytes_per_s: float = 25e9
    """Rate of each engine's link, in each direction: 200 Gbit/s."""
    latency_s: float = 2e-3
    """From the order to the first byte, and what the last byte needs."""
    kv_bytes_per_token: float = 131_072
    """KV of one token on the wire. Llama 3 8B in bf16 has 128 KiB."""
    layers: int = 32
    overlap: bool = True
    """Whether KV streams while the prompt is computed. Then only what the prefill's time does not
    cover is waited for, and at least the last layer."""

    def __post_init__(self) -> None:
        """Raises: ValueError: naming the setting, the value found and the value wanted."""
        for name in ("bytes_per_s", "kv_bytes_per_token"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)}: must be above 0")
        if not self.latency_s >= 0:
            raise ValueError(f"latency_s {self.latency_s}: must be 0 or more")

    def exposed_bytes(self, tokens: int, prefill_s: float) -> float:
        """Bytes that are left to send when a prefill that took `prefill_s` has ended."""
        size = tokens * self.kv_bytes_per_token
        if not self.overlap:
            return size
        return max(size / self.layers, size - prefill_s * self.bytes_per_s)

    def alone_s(self, tokens: int) -> float:
        """Time to move the KV of `tokens` tokens over idle links."""
        return self.latency_s + tokens * self.kv_bytes_per_token / self.bytes_per_s


@dataclass(eq=False, slots=True)
class _Flow:
    source: str
    target: str
    left: float  # bytes
    done: Done
    rate: float = field(default=0.0)  # bytes a second


class Links:
    """Transfers that share links fairly: max-min, by the outgoing link of the source and the
    incoming one of the target."""

    def __init__(self, network: Network, rates: Mapping[str, float] | None = None) -> None:
        """`rates`: bytes a second of what is not an engine, in each direction."""
        self.network = network
        self._rates = rates or {}
        self._flows: list[_Flow] = []
        self._now_s = 0.0
        self.next_event_s = inf
        """When the first transfer ends."""
        self.moved_bytes = 0
        """All that was sent so far."""

    def start(self, source: str, target: str, size: float, now_s: float, done: Done) -> None:
        """Begin to move `size` bytes. `done` is called by `advance`."""
        self._pass(now_s)
        self.moved_bytes += int(size)
        self._flows.append(_Flow(source, target, size, done))
        self._share()

    def advance(self, now_s: float) -> None:
        """End the transfers whose last byte has left at `now_s`, which is `next_event_s`."""
        self._pass(now_s)
        ended = [one for one in self._flows if one.left <= _ENDED_BYTES]
        self._flows = [one for one in self._flows if one.left > _ENDED_BYTES]
        self._share()
        for one in ended:
            one.done(now_s)

    def drop(self, engine: str) -> None:
        """An engine died: its transfers end nowhere."""
        self._flows = [one for one in self._flows if engine not in (one.source, one.target)]
        self._share()

    def estimate_s(self, source: str, target: str, tokens: int) -> float:
        """Time to move the KV of `tokens` tokens if the transfers that are under way stay."""
        sharing = 1 + max(
            sum(one.source == source for one in self._flows),
            sum(one.target == target for one in self._flows),
        )
        network = self.network
        size = tokens * network.kv_bytes_per_token
        return network.latency_s + size * sharing / min(self._rate(source), self._rate(target))

    def _rate(self, name: str) -> float:
        return self._rates.get(name, self.network.bytes_per_s)

    def _pass(self, now_s: float) -> None:
        elapsed_s = now_s - self._now_s
        for one in self._flows:
            one.left -= one.rate * elapsed_s
        self._now_s = now_s

    def _share(self) -> None:
        """Give every transfer its rate: the most contended link first, then what it leaves to
        others."""
        flows = self._flows
        if len(flows) == 1:
            flows[0].rate = min(self._rate(flows[0].source), self._rate(flows[0].target))
        elif flows:
            _share_fairly(flows, self._rate)
        self.next_event_s = min(
            (self._now_s + max(0.0, one.left) / one.rate for one in flows), default=inf
        )


def _share_fairly(flows: list[_Flow], rate_of: Callable[[str], float]) -> None:
    links: dict[tuple[str, bool], list[_Flow]] = {}
    for one in flows:
        links.setdefault((one.source, True), []).append(one)
        links.setdefault((one.target, False), []).append(one)
    room = {link: rate_of(link[0]) for link in links}
    waiting = set(flows)
    while waiting:
        share, tightest = min(
            ((room[link] / len(using), link) for link, using in links.items() if using),
            key=lambda pair: pair[0],
        )
        for one in list(links[tightest]):
            one.rate = share
            waiting.discard(one)
            for link in ((one.source, True), (one.target, False)):
                links[link].remove(one)
                room[link] -= share
