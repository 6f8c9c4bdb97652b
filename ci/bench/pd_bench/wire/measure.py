# SPDX-License-Identifier: Apache-2.0
"""`bench wire`: KV moved between two processes without engines, beside one descriptor per page.

Everything runs in the same two processes, one contender after the other, with the baselines first and last, so
that all see the same noise. Received KV is verified after each run, outside the measured time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pd_bench.machine import Noise
from pd_bench.report import Compared, Comparison, Param, Say
from pd_bench.sample import Sample
from pd_bench.wire.pair import WirePair, WireRun

MAX_DESCRIPTORS = 1 / 50
"""Largest share of the baseline's descriptors that ours may need when it collates. Pages that are read in place
need as many pieces as there are pages."""
LOCAL_BAR = 0.55
"""Share of the baseline's rate to reach for pages on one machine. Ours copies and then hashes the bytes; the baseline
only copies and verifies nothing."""
_GB = 1e9


@dataclass(frozen=True)
class WireContender:
    """One way to move KV, with its bar.

    Args:
        name: its name for users.
        kind: `ours`, `pages` (a descriptor per page) or `plain` (bytes over TCP).
        settings: of our agents.
        bar: least share of the baseline's rate; None for no bar.
        collates: whether chunks are gathered. Over shared memory, like pages are read in place instead.
    """

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    bar: float | None = None
    collates: bool = True

    @property
    def lossy(self) -> bool | None:
        """Whether pages may have small errors; None for bytes that are not stored."""
        return None if self.kind == "plain" else self.settings.get("codec", "raw") != "raw"

    @property
    def params(self) -> dict[str, Param]:
        transport = self.settings["transports"][0]
        plain = ", insecure" if self.settings.get("insecure") else ""
        return {"transport": f"{transport}{plain}", "codec": self.settings["codec"]}


PAGES = WireContender("NIXL pages", "pages")
LINE = WireContender("plain TCP", "plain")

_CODEC_BARS = {"raw": 0.97, "fp8_e4m3": 1.9, "int8": 1.9}
CODECS = tuple(_CODEC_BARS)


def local_contender(transport: str, codec: str) -> WireContender:
    """Ours on one machine."""
    direct = (transport, codec) == ("shm", "raw")
    return _ours(transport, codec, LOCAL_BAR if direct else None, collates=not direct)


def link_contender(transport: str, codec: str) -> WireContender:
    """Ours over a link."""
    return _ours(transport, codec, _CODEC_BARS[codec] if transport == "tcp" else None)


def insecure_contender(transport: str, codec: str) -> WireContender:
    """Ours over a link without a key. The difference to `link_contender` is the cost of encryption."""
    contender = link_contender(transport, codec)
    settings = {**contender.settings, "key": "", "insecure": True}
    return replace(contender, name=f"{contender.name}, insecure", settings=settings)


class WireFindings(NamedTuple):
    """Tables with the names of their baselines, and the cores used by other programs."""

    tables: list[Compared]
    others_cores: float


def measure(
    pair: WirePair,
    place: str,
    ours: Sequence[WireContender],
    tokens: int,
    runs: int,
    warm_ups: int,
    say: Say,
) -> WireFindings:
    """Measure all contenders in turn.

    Args:
        place: `local` or `link`; over a link the line rate is also a baseline.

    Raises:
        BenchError: KV did not arrive, or not all of it was right.
    """
    from pd_connector.tools.wire import TOKEN_BYTES

    baselines = [PAGES, LINE] if place == "link" else [PAGES]
    gb = tokens * TOKEN_BYTES / _GB
    by_contender: dict[str, list[WireRun]] = {}
    noise = Noise()
    for contender in (*baselines, *ours, *baselines):
        pair.open(contender.kind, contender.settings)
        for number in range(warm_ups + runs):
            run = pair.run(contender.lossy)
            gb_per_s = gb / run.seconds
            label = "warm-up" if number < warm_ups else f"run {number - warm_ups + 1}/{runs}"
            say(f"{place}, {contender.name}, {label}: {gb_per_s:.2f} GB/s")
            if number >= warm_ups:
                by_contender.setdefault(contender.name, []).append(run)
        pair.close()
    tables = [
        (
            base.name,
            [
                row
                for contender in ours
                for row in _compare(contender, base, place, by_contender, gb)
            ],
        )
        for base in baselines
    ]
    return WireFindings(tables, noise.cores())


def _compare(
    contender: WireContender,
    base: WireContender,
    place: str,
    by_contender: Mapping[str, list[WireRun]],
    gb: float,
) -> list[Comparison]:
    at_home = place == "local"

    def compare(
        what: str, unit: str, figure: Callable[[WireRun], float], bar: float | None, more: bool
    ) -> Comparison:
        ours, baseline = (
            Sample(tuple(map(figure, by_contender[side.name]))) for side in (contender, base)
        )
        return Comparison(
            f"{place} {what}", contender.params, ours, baseline, unit, bar, more_is_better=more
        )

    bar = contender.bar if at_home or base is LINE else None
    rate = compare("rate", "GB/s", lambda run: gb / run.seconds, bar, True)
    if base is LINE:
        return [replace(rate, name=f"{place} capacity")]
    most = MAX_DESCRIPTORS if at_home and contender.collates else None
    return [
        rate,
        compare("descriptors", "/GB", lambda run: run.descriptors / gb, most, False),
        compare("CPU", "s/GB", lambda run: run.cpu_s / gb, None, False),
    ]


def _ours(transport: str, codec: str, bar: float | None, *, collates: bool = True) -> WireContender:
    settings = {"transports": [transport], "codec": codec}
    return WireContender(f"{transport} {codec}", "ours", settings, bar, collates)
