# SPDX-License-Identifier: Apache-2.0
"""Times of several policies as a picture: the fraction of requests that waited no longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420, 260, 50, 40, 70
_COLOURS = (
    "#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#1f78b4", "#666666", "#000000",
)  # fmt: skip
_POINTS = 120


def svg(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Cumulative distributions as an SVG document.

    Args:
        panels: for each title, for each policy, times in seconds. Every panel has the same
            policies.
    """
    names = list(next(iter(panels.values())))
    drawn = [_panel(title, times, n) for n, (title, times) in enumerate(panels.items())]
    legend_top = _TOP + _HEIGHT + 50
    legend = [
        _text(_LEFT + n % 5 * 170, legend_top + n // 5 * 18, name, _COLOURS[n % len(_COLOURS)])
        for n, name in enumerate(names)
    ]
    width = _LEFT + len(panels) * (_WIDTH + _GAP)
    height = legend_top + (len(names) + 4) // 5 * 18 + 10
    body = "\n".join([*drawn, *legend])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def _panel(title: str, times: Mapping[str, Sequence[float]], n: int) -> str:
    left, bottom = _LEFT + n * (_WIDTH + _GAP), _TOP + _HEIGHT
    shown = {name: sorted(max(1e-4, seconds) for seconds in given) for name, given in times.items()}
    every = [seconds for given in shown.values() for seconds in (given[:1] + given[-1:])] or [
        1e-3,
        1.0,
    ]
    low, high = floor(log10(min(every))), ceil(log10(max(every)))
    high = max(high, low + 1)
    parts = [
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>',
        _text(left, _TOP - 8, title),
        _text(left - 34, _TOP + 10, "100 %"),
        _text(left - 24, bottom, "0"),
    ]
    for power in range(low, high + 1):
        x = left + (power - low) / (high - low) * _WIDTH
        parts.append(_text(x - 10, bottom + 18, f"{10.0**power:g} s"))
        parts.append(f'<path d="M{x:.1f} {_TOP}v{_HEIGHT}" stroke="#ddd"/>')
    for k, given in enumerate(shown.values()):
        if not given:
            continue
        picked = [round(i * (len(given) - 1) / _POINTS) for i in range(_POINTS + 1)]
        line = " ".join(
            f"{left + (log10(given[i]) - low) / (high - low) * _WIDTH:.1f},"
            f"{bottom - (i + 1) / len(given) * _HEIGHT:.1f}"
            for i in picked
        )
        colour = _COLOURS[k % len(_COLOURS)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "\n".join(parts)


def _text(x: float, y: float, text: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{escape(text)}</text>'
