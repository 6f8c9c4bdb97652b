# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench core`: the costs of the connector's parts, each against its bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ParamSpec, TypeVar

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, noise_note, report
from pd_bench.machine import Noise
from pd_bench.report import Comparison
from pd_bench.sample import Sample
from pd_connector.tools.output import Json

BUDGET_MS = 1.0
"""The most CPU time of planning and bookkeeping for one request on each side."""
_LONGEST_PAGE = 128

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)


Given = ParamSpec("Given")
Found = TypeVar("Found")


def _measured(
    measure: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs
) -> tuple[Found, str]:
    """What `measure` found, and a note on how busy other programs kept the machine."""
    with exit_codes(Console(stderr=True)):
        noise = Noise()
        return measure(*args, **kwargs), noise_note(noise.cores())


@app.callback()
def group() -> None:
    """What parts of the connector cost, without engines."""


@app.command()
def reshard(
    tokens: Annotated[
        int, typer.Option(min=_LONGEST_PAGE, help=f"Prompt, a multiple of {_LONGEST_PAGE}.")
    ] = 2048,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each pair.")] = 5,
    json: Json = None,
) -> None:
    """Gather and scatter between TP 1, 2, 4, 8 and pages of 16 and 128 tokens, beside torch.

    Exit code 1 if, for one pair of page sizes, the slowest pair of TP sizes has less than half the rate of the fastest.
    """
    # torch takes seconds to import.
    from pd_bench.core.reshard import PAGE_SIZES, TP_SIZES, measure

    if tokens % _LONGEST_PAGE:
        raise typer.BadParameter(f"{tokens}: must be a multiple of {_LONGEST_PAGE}")
    comparisons, note = _measured(measure, tokens, runs, TP_SIZES, PAGE_SIZES)
    flat = [row for row in comparisons if row.bar is not None]
    pairs = [row for row in comparisons if row.bar is None]
    report([("torch", pairs), ("fastest", flat)], [note], json)


@app.command()
def codec(
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each.")] = 9, json: Json = None
) -> None:
    """Code bfloat16 on one core with the loops that numba compiles, beside torch's operations."""
    from pd_bench.core.codec import measure

    comparisons, note = _measured(measure, runs)
    report([("torch", comparisons)], [note], json)


@app.command()
def overhead(json: Json = None) -> None:
    """CPU time of planning and bookkeeping for a 32-layer request of 8,192 tokens, each side.

    Exit code 1 when a side needs more than a millisecond.
    """
    from pd_bench.core.overhead import planning_overhead

    spent_each_ms, note = _measured(planning_overhead)
    spent = dict(zip(("producer", "consumer"), spent_each_ms, strict=True))
    comparisons = [
        Comparison(
            "overhead", {"side": side}, Sample((spent_ms,)), Sample((BUDGET_MS,)), "ms", bar=1.0
        )
        for side, spent_ms in spent.items()
    ]
    report([("budget", comparisons)], [note], json)


@app.command()
def audit(
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each.")] = 9, json: Json = None
) -> None:
    """The cost of comparing KV beside writing it, and the cost of audits for an unaudited request."""
    from pd_bench.core.audit import measure

    comparisons, note = _measured(measure, runs)
    report([("without", comparisons)], [note], json)


@app.command()
def peers(json: Json = None) -> None:
    """CPU time of an agent with sessions with 256 producers, over which 8,000 requests wait.

    Exit code 1 when its thread needs more than 1 ms a second at rest, or 0.2 ms a message.
    """
    from pd_bench.core.peers import MESSAGE_BUDGET_MS, REST_BUDGET_MS, measure

    spent_ms_of, note = _measured(measure)
    spent = (
        ("a second at rest", spent_ms_of.rest_ms, REST_BUDGET_MS),
        ("a message", spent_ms_of.message_ms, MESSAGE_BUDGET_MS),
    )
    comparisons = [
        Comparison("peers", {"cost of": what}, Sample((ms,)), Sample((budget_ms,)), "ms", bar=1.0)
        for what, ms, budget_ms in spent
    ]
    report([("budget", comparisons)], [note], json)
