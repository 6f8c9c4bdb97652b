# SPDX-License-Identifier: Apache-2.0
"""The lambda sweep as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd_bench.scheduler.order import LAMBDAS, LOADS, SweepPoint

_WIDTH, _HEIGHT, _LEFT, _TOP = 360, 240, 56, 34
_COLOURS = ("#1b9e77", "#d95f02", "#7570b3")


def svg(points: Sequence[SweepPoint]) -> str:
    """Mean and 99th percentile over lambda, a line for each load, as an SVG document."""
    panels = [
        _panel("mean TTFT, s", points, lambda point: point.mean_s, _LEFT),
        _panel("p99 TTFT, s", points, lambda point: point.p99_s, 2 * _LEFT + _WIDTH),
    ]
    names = [
        _text(_LEFT + n * 110, 16, f"load {load:g}", colour)
        for n, (load, colour) in enumerate(zip(LOADS, _COLOURS, strict=True))
    ]
    width, height = 2 * (_LEFT + _WIDTH) + 20, _TOP + _HEIGHT + 50
    body = "\n".join((*names, *panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def _panel(
    title: str, points: Sequence[SweepPoint], value: Callable[[SweepPoint], float], left: int
) -> str:
    top = 1.05 * max(value(point) for point in points)
    bottom = _TOP + _HEIGHT
    parts = [
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>',
        _text(left, _TOP - 6, title),
        _text(left - 40, _TOP + 10, f"{top:.2f}"),
        _text(left - 12, bottom, "0"),
        _text(left + _WIDTH // 2, bottom + 38, "lambda, s per s"),
    ]
    parts += [
        _text(_x(left, n) - 8, bottom + 18, f"{lambda_:g}") for n, lambda_ in enumerate(LAMBDAS)
    ]
    for load, colour in zip(LOADS, _COLOURS, strict=True):
        line = " ".join(
            f"{_x(left, LAMBDAS.index(point.lambda_))},{bottom - value(point) / top * _HEIGHT:.1f}"
            for point in points
            if point.load == load
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "\n".join(parts)


def _x(left: int, n: int) -> int:
    return left + 10 + n * (_WIDTH - 20) // (len(LAMBDAS) - 1)


def _text(x: int, y: int, text: str, colour: str = "#222") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}">{text}</text>'
