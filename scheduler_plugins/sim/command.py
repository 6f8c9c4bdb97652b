# SPDX-License-Identifier: Apache-2.0
"""`pd-router simulate TRACE`: the effect of policies on a trace."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from html import escape
from inspect import Parameter
from math import ceil, floor, log10
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pd_connector.errors import PDConnectorError
from pd_connector.tools.command_line import option, single
from pd_connector.tools.output import write_problem
from scheduler_plugins.cost.profile import load
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.registry import DEFAULT
from scheduler_plugins.sim import fleet, trace
from scheduler_plugins.sim.kv_pool import PoolSettings
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.report import Summary
from scheduler_plugins.sim.served import Served
from scheduler_plugins.sim.simulate import COSTS, CPU_COSTS, Scenario, policies, simulate

_PICTURE_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420, 260, 50, 40, 70
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
    width = _LEFT + len(panels) * (_PICTURE_WIDTH + _GAP)
    height = legend_top + (len(names) + 4) // 5 * 18 + 10
    body = "\n".join([*drawn, *legend])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def _panel(title: str, times: Mapping[str, Sequence[float]], n: int) -> str:
    left, bottom = _LEFT + n * (_PICTURE_WIDTH + _GAP), _TOP + _HEIGHT
    shown = {name: sorted(max(1e-4, seconds) for seconds in given) for name, given in times.items()}
    every = [seconds for given in shown.values() for seconds in (given[:1] + given[-1:])] or [
        1e-3,
        1.0,
    ]
    low, high = floor(log10(min(every))), ceil(log10(max(every)))
    high = max(high, low + 1)
    parts = [
        f'<rect x="{left}" y="{_TOP}" width="{_PICTURE_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>',
        _text(left, _TOP - 8, title),
        _text(left - 34, _TOP + 10, "100 %"),
        _text(left - 24, bottom, "0"),
    ]
    for power in range(low, high + 1):
        x = left + (power - low) / (high - low) * _PICTURE_WIDTH
        parts.append(_text(x - 10, bottom + 18, f"{10.0**power:g} s"))
        parts.append(f'<path d="M{x:.1f} {_TOP}v{_HEIGHT}" stroke="#ddd"/>')
    for k, given in enumerate(shown.values()):
        if not given:
            continue
        picked = [round(i * (len(given) - 1) / _POINTS) for i in range(_POINTS + 1)]
        line = " ".join(
            f"{left + (log10(given[i]) - low) / (high - low) * _PICTURE_WIDTH:.1f},"
            f"{bottom - (i + 1) / len(given) * _HEIGHT:.1f}"
            for i in picked
        )
        colour = _COLOURS[k % len(_COLOURS)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "\n".join(parts)


def _text(x: float, y: float, text: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{escape(text)}</text>'


FAILED = 2
_LEVEL_1_MISLEADS = (
    "At level 1 a step is a whole prompt: an engine that moves to decode first ends its prompts, and its sequences wait for "
    "whole prompts. Use --level 2 to compare role policies."
)
_WIDTH = 120
"""Width of the table if there is no terminal."""
_COUNTS = {
    "prefill": "prefill engines",
    "decode": "decode engines",
    "both": "engines that prefill and decode; needs --prefill 0 --decode 0",
    "cpu_prefill": "prefill engines without a GPU, for long prompts in the background (policy length)",
    "level": "detail of the simulation; 1: whole prompts, 2: steps and room for KV",
    "hosts": "hosts over which engines are spread, each with a KV pool of its own (--pool-blocks); 0: one pool for all engines",
    "host_deaths": "how often a host dies with its caches and pool, evenly over the trace; it serves again after a minute",
    "cache_blocks": "size of each engine's prefix cache, in blocks",
    "seed": "seed of all random choices",
}
_NUMBERS = {
    "kv_tokens": "room of an engine for decoding requests, in tokens (level 2)",
    "lag_s": "delay until the router knows what engines have cached, in seconds",
    "background": "share of background requests, chosen at random",
    "speed": "factor by which requests come faster than recorded",
}
_NETWORK = {
    "bytes_per_s": "bandwidth of each engine's link, in each direction, in bytes per second",
    "latency_s": "latency of a transfer, in seconds",
    "kv_bytes_per_token": "size of one token's KV on the wire, in bytes",
}
_POOL = {
    "blocks": "size of a KV pool that all engines share, or each host has (--hosts), in blocks; 0: no pool",
    "bytes_per_s": "bandwidth of the pool for all puts together, and for all gets together",
    "latency_s": "latency of a put or a get, added to a transfer's latency, in seconds",
}
_FAR = {
    "blocks": "size of a far store behind the pools of hosts, in blocks; 0: none",
    "bytes_per_s": "bandwidth of the far store for all puts together, and for all gets together",
    "latency_s": "latency of a put or a get there, added to a transfer's latency, in seconds",
}


_TEXTS = (
    (
        "per-s",
        "",
        "N,...",
        "mean requests a second of each trace, with commas; by default as recorded",
    ),
    (
        "policy",
        "",
        "NAME",
        f"the router's --policy; by default {DEFAULT}, or the policy that belongs to --roles",
    ),
    (
        "roles",
        "",
        "NAMES",
        "role policies to compare, with commas: engines change between prefill and decode; needs --level 2",
    ),
    ("decode-policy", "", "NAME", "the router's --decode-policy"),
    ("compare", "", "NAMES", "policies to compare, separated by commas; all: every policy"),
    ("order", "srjf_calibrated", "NAME", "order of the engines' queues"),
)
_FLEET = "unlike engines and their links, in place of the numbers of engines, costs, room and links; pd-router plan writes such files"


def play(**options: Any) -> None:
    """Play a recorded trace through a simulated cluster."""
    given = SimpleNamespace(**options)
    console = Console(stderr=given.json == "-")
    if not console.is_terminal:
        console.width = _WIDTH
    try:
        given.per_s = _rates(given.per_s)
        _check(given)
        scenario = _scenario(given)
        recorded = [_recorded(path, given) for path in given.trace]
        arrivals = scenario.arrivals(*recorded, per_s=given.per_s)
        names = policies(given.compare) if given.compare else [given.policy]
        runs = [(name, roles) for name in names for roles in _names(given.roles) or [""]]
        results = list[tuple[Summary, list[Served]]]()
        took_s = list[float]()
        for name, roles in runs:
            begun_s = time.perf_counter()
            with console.status(f"{name or 'its policy'} {roles}: {len(arrivals):,} requests"):
                results.append(simulate(scenario, arrivals, name, given.decode_policy, roles))
            took_s.append(time.perf_counter() - begun_s)
    except (PDConnectorError, ValueError) as error:
        _fail(f"not simulated: {error}")
    summaries = [summary for summary, _ in results]
    console.print(_table(summaries, took_s))
    if given.roles and scenario.level == 1:
        console.print(_LEVEL_1_MISLEADS, soft_wrap=True, highlight=False)
    try:
        _write(given, summaries, {summary.policy: served for summary, served in results})
    except OSError as error:
        _fail(f"not written: {error}")


def _recorded(path: Path, given: SimpleNamespace) -> Sequence[Waiting]:
    """The part of a trace that is played."""
    limit = None if given.limit is None else given.skip + given.limit
    requests = trace.load(path, limit)
    if given.skip >= len(requests):
        raise ValueError(f"skip {given.skip}: {path} has only {len(requests):,} requests")
    return requests[given.skip :]


def _fail(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    raise typer.Exit(FAILED)


def _check(given: SimpleNamespace) -> None:
    """Raises ValueError for errors that would otherwise appear only after the simulation."""
    if given.limit is not None and given.limit < 1:
        raise ValueError(f"limit {given.limit}: must be 1 or more requests")
    if given.skip < 0:
        raise ValueError(f"skip {given.skip}: must be 0 or more requests")
    if given.per_s and len(given.per_s) != len(given.trace):
        raise ValueError(
            f"per_s {given.per_s}: must have a rate for each of {len(given.trace)} traces"
        )
    if given.compare and not policies(given.compare):
        raise ValueError(f"compare {given.compare!r}: must name policies, with commas, or be all")
    for path in (given.json, given.svg):
        if path and str(path) != "-" and (problem := write_problem(Path(path))):
            raise ValueError(problem)


def _names(given: str | None) -> list[str]:
    return [name.strip() for name in (given or "").split(",") if name.strip()]


def _scenario(given: SimpleNamespace) -> Scenario:
    network = Network(
        overlap=not given.no_overlap, **{name: getattr(given, name) for name in _NETWORK}
    )
    settings = {name: getattr(given, name) for name in [*_COUNTS, *_NUMBERS]}
    return Scenario(
        **settings,
        fleet=fleet.load(given.fleet) if given.fleet else None,
        order=given.order,
        costs=load(given.cost_model) if given.cost_model else COSTS,
        cpu_costs=load(given.cpu_cost_model) if given.cpu_cost_model else CPU_COSTS,
        network=network,
        pool=PoolSettings(**{name: getattr(given, f"pool_{name}") for name in _POOL}),
        far=_far(given),
        ttft_slo_s=given.ttft_ms / 1e3,
        tpot_slo_s=given.tpot_ms / 1e3,
    )


def _far(given: SimpleNamespace) -> PoolSettings:
    try:
        return PoolSettings(**{name: getattr(given, f"far_{name}") for name in _FAR})
    except ValueError as error:
        raise ValueError(str(error).replace("pool", "far", 1)) from None


def _parameters() -> Iterator[Parameter]:
    yield Parameter(
        "trace",
        Parameter.KEYWORD_ONLY,
        annotation=Annotated[
            list[Path],
            typer.Argument(
                help="trace file: Mooncake's JSON lines, or Azure's .csv; several are played one after another"
            ),
        ],
    )
    for name, default, metavar, meaning in _TEXTS:
        yield option(name, str, default, meaning, metavar=metavar)
    for name in ("cost-model", "cpu-cost-model"):
        whose = "the --cpu-prefill engines" if name.startswith("cpu") else "the engines"
        meaning = f"cost model of {whose}; pd-connector profile writes it"
        yield option(name, Path | None, None, meaning, metavar="FILE")
    yield option("fleet", Path | None, None, _FLEET, metavar="FILE")
    yield option("skip", int, 0, "leave out the first N requests", metavar="N")
    yield option("limit", int | None, None, "play only the first N requests", metavar="N")
    for name, what in (("ttft", "time to first token"), ("tpot", "time per token")):
        meaning = f"promised {what}; goodput counts requests that keep it, and policies reject requests that would break it"
        yield option(f"{name}-ms", float, float("inf"), meaning, metavar="MS")
    for texts, owner, prefix in (
        (_COUNTS, Scenario, ""),
        (_NUMBERS, Scenario, ""),
        (_NETWORK, Network, ""),
        (_POOL, PoolSettings, "pool_"),
        (_FAR, PoolSettings, "far_"),
    ):
        defaults = {field.name: field.default for field in fields(owner)}
        for name, text in texts.items():
            value, flag = defaults[name], (prefix + name).replace("_", "-")
            yield option(flag, type(value), value, text, metavar="N")
    yield option("no-overlap", bool, False, "send KV after the prefill, not during it")
    meaning = "write the results to this file; -: standard output"
    yield option("json", str, "", meaning, metavar="FILE")
    meaning = "draw TTFT and TPOT into this file"
    yield option("svg", Path | None, None, meaning, metavar="FILE")


def _rates(text: str) -> list[float]:
    """Numbers with commas. Raises ValueError: the text is something else."""
    try:
        rates = [float(rate) for rate in text.split(",") if text]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"per_s {text!r}: must be numbers above 0, with commas")
    return rates


def _write(
    given: SimpleNamespace,
    summaries: Sequence[Summary],
    served: dict[str, list[Served]],
) -> None:
    if given.json:
        raw = (
            msgspec.json.format(msgspec.json.encode([asdict(summary) for summary in summaries]))
            + b"\n"
        )
        if given.json == "-":
            sys.stdout.write(raw.decode())
        else:
            Path(given.json).write_bytes(raw)
    if given.svg:
        done = {
            name: [request for request in all_ if request.end_s is not None]
            for name, all_ in served.items()
        }
        panels = {
            "time to first token": {n: [request.ttft_s for request in d] for n, d in done.items()},
            "time per token": {
                n: [request.tpot_s for request in d if request.request.max_tokens > 1]
                for n, d in done.items()
            },
        }
        given.svg.write_text(svg(panels))


def _table(summaries: Sequence[Summary], took_s: Sequence[float]) -> Table:
    columns = (
        "policy", "TTFT s", "p50", "p99", "TPOT ms", "p99", "hit", "goodput /s", "in time", "P busy", "D busy", "moves", "rejected", "took s",
    )  # fmt: skip
    with_far = any(summary.far for summary in summaries)
    at = columns.index("hit") + 1
    shown = [*columns[:at], *(["far"] if with_far else []), *columns[at:]]
    table = Table(*shown, box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for summary, seconds in zip(summaries, took_s, strict=True):
        table.add_row(
            summary.policy,
            *(f"{summary.ttft_s[key]:.3f}" for key in ("mean", "p50", "p99")),
            *(f"{summary.tpot_s[key] * 1e3:.1f}" for key in ("mean", "p99")),
            f"{summary.hit:.3f}",
            *([f"{summary.far:.3f}"] if with_far else []),
            f"{summary.goodput_per_s:.2f}",
            f"{summary.attained * summary.served / summary.requests:.3f}",
            *(_busy(summary, letter) for letter in ("p", "d")),
            str(len(summary.moves)),
            str(sum(summary.rejected.values())),
            f"{seconds:.2f}",
        )
    return table


def _busy(summary: Summary, letter: str) -> str:
    """Mean utilisation of the engines whose names begin with this letter, by their first role. Engines `b` do both."""
    parts = [part for name, part in summary.utilisation.items() if name[0] in (letter, "b")]
    return f"{sum(parts) / len(parts):.0%}" if parts else "-"


app = single(play, _parameters())
