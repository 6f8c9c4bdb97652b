# SPDX-License-Identifier: Apache-2.0
"""`bench wire`: KV moved between two processes without engines, beside one descriptor per page.

Everything runs in the same two processes, one way after the other: the baselines first and last,
so that all see the same noise. What has arrived is verified after each run, outside the time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pd_connector.bench.machine import Noise
from pd_connector.bench.report import Comparison, Param
from pd_connector.bench.sample import Sample
from pd_connector.bench.wire_pair import WirePair, WireRun
from pd_connector.bench.wire_size import TOKEN_BYTES

MAX_DESCRIPTORS = 1 / 50
"""Ours may need at most this share of the descriptors of the baseline, where it collates: pages that
are read where they lie are as many pieces as they are pages."""
_GB = 1e9

Say = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """One way to move KV.

    Args:
        name: what a person calls it.
        kind: `ours`, `pages` (a descriptor per page) or `plain` (bytes over TCP).
        settings: of our agents.
        bar: the least of the baseline's rate that is asked for; None for nothing.
        collates: whether chunks are gathered; over shared memory like pages are read where they lie.
    """

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    bar: float | None = None
    collates: bool = True

    @property
    def lossy(self) -> bool | None:
        """As `WirePair.run` wants to know it."""
        return None if self.kind == "plain" else self.settings.get("codec", "raw") != "raw"

    @property
    def params(self) -> dict[str, Param]:
        transport = self.settings["transports"][0]
        plain = ", insecure" if self.settings.get("insecure") else ""
        return {"transport": f"{transport}{plain}", "codec": self.settings["codec"]}


PAGES = Way("NIXL pages", "pages")
LINE = Way("plain TCP", "plain")

_CODEC_BARS = {"raw": 0.97, "fp8_e4m3": 1.9, "int8": 1.9}
CODECS = tuple(_CODEC_BARS)


def local_way(transport: str, codec: str) -> Way:
    """Ours on one machine."""
    direct = (transport, codec) == ("shm", "raw")
    return _ours(transport, codec, 1.0 if direct else None, collates=not direct)


def link_way(transport: str, codec: str) -> Way:
    """Ours over a link."""
    return _ours(transport, codec, _CODEC_BARS[codec] if transport == "tcp" else None)


def insecure_way(transport: str, codec: str) -> Way:
    """Ours over a link without a key: what encryption costs is the difference to `link_way`."""
    way = link_way(transport, codec)
    settings = {**way.settings, "key": "", "insecure": True}
    return replace(way, name=f"{way.name}, insecure", settings=settings)


class WireFindings(NamedTuple):
    """Tables with the names of their baselines, and how busy others kept the machine, in cores."""

    tables: list[tuple[str, list[Comparison]]]
    others_cores: float


def measure(
    pair: WirePair, place: str, ours: Sequence[Way], tokens: int, runs: int, warm_ups: int, say: Say
) -> WireFindings:
    """Measure all ways in turn.

    Args:
        place: `local` or `link`; over a link the line rate is a baseline, too.

    Raises:
        BenchError: KV did not arrive, or not all of it was right.
    """
    baselines = [PAGES, LINE] if place == "link" else [PAGES]
    found: dict[str, list[WireRun]] = {}
    noise = Noise(pair.pids)
    for way in (*baselines, *ours, *baselines):
        pair.open(way.kind, way.settings)
        for number in range(warm_ups + runs):
            run = pair.run(way.lossy)
            gb_per_s = tokens * TOKEN_BYTES / run.seconds / _GB
            label = "warm-up" if number < warm_ups else f"run {number - warm_ups + 1}/{runs}"
            say(f"{place}, {way.name}, {label}: {gb_per_s:.2f} GB/s")
            if number >= warm_ups:
                found.setdefault(way.name, []).append(run)
        pair.close()
    tables = [
        (base.name, [one for way in ours for one in _compare(way, base, place, found, tokens)])
        for base in baselines
    ]
    return WireFindings(tables, noise.cores())


def _compare(
    way: Way, base: Way, place: str, found: Mapping[str, list[WireRun]], tokens: int
) -> list[Comparison]:
    gb = tokens * TOKEN_BYTES / _GB
    at_home = place == "local"

    def compare(
        what: str, unit: str, figure: Callable[[WireRun], float], bar: float | None, more: bool
    ) -> Comparison:
        ours, baseline = (Sample(tuple(map(figure, found[one.name]))) for one in (way, base))
        return Comparison(
            f"{place} {what}", way.params, ours, baseline, unit, bar, more_is_better=more
        )

    bar = way.bar if at_home or base is LINE else None
    rate = compare("rate", "GB/s", lambda run: gb / run.seconds, bar, True)
    if base is LINE:
        return [replace(rate, name=f"{place} capacity")]
    most = MAX_DESCRIPTORS if at_home and way.collates else None
    return [
        rate,
        compare("descriptors", "/GB", lambda run: run.descriptors / gb, most, False),
        compare("CPU", "s/GB", lambda run: run.cpu_s / gb, None, False),
    ]


def _ours(transport: str, codec: str, bar: float | None, *, collates: bool = True) -> Way:
    settings = {"transports": [transport], "codec": codec}
    return Way(f"{transport} {codec}", "ours", settings, bar, collates)
