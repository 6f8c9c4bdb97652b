# SPDX-License-Identifier: Apache-2.0
"""`pd-router plan TRACE`: which engines to start on which GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from inspect import Parameter
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pd_connector.errors import PDConnectorError
from pd_connector.tools.command_line import option, single
from scheduler_plugins.order.registry import create as create_order
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.planner import files, inventory
from scheduler_plugins.planner.errors import PlanError
from scheduler_plugins.planner.estimate import Model, read_model
from scheduler_plugins.planner.goodput import WINDOWS, Promise
from scheduler_plugins.planner.page import page
from scheduler_plugins.planner.plan import FEWEST, Plan, make
from scheduler_plugins.router.policies.registry import DEFAULT
from scheduler_plugins.router.policies.registry import create as create_policy
from scheduler_plugins.sim import trace

FAILED = 2
_GENERATED, _MOST_REQUESTS = 3000, 1_000_000
"""Fewest requests of a trace that is made of two lengths, and the most that windows have together."""
_MOST_MS = 3_600_000.0
"""Windows of the lowest rates last hardly longer."""
_WIDTH = 140
_TEXTS = (
    ("model", "FOLDER", "the model's config.json or its folder: costs are estimated from data sheets where no profile is named"),
    ("device", "NAME", "devices of one node, in place of --inventory"),
    ("order", "NAME", "order of the engines' queues"),
    ("policy", "NAME", f"the router's --policy; by default {DEFAULT}"),
)  # fmt: skip


def plan(**options: Any) -> None:
    """Find which engines to start on which GPUs."""
    given = SimpleNamespace(**options)
    console = Console(stderr=True)
    try:
        made, name = _made(given, console)
        if given.out:
            engines = files.engines_of(made.chosen.candidate, made.inventory)
            values, problem = files.chart_values(engines, name)
            compose, its = files.compose_services(made, engines, name)
            left_out = [f"{files.VALUES}: {problem}"] if problem else []
            left_out += [f"{files.COMPOSE}: {its}"] if its else []
            text = page(made, _trace_name(given), left_out)
            files.write(made, given.out, name, text, values=values, compose=compose)
    except (PDConnectorError, ValueError) as error:
        print(f"not planned: {error}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    shown = Console()
    if not shown.is_terminal:
        shown.width = _WIDTH
    shown.print(_table(made))
    shown.print(
        f"recommended: {made.chosen.candidate.name}, because {made.why}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    for doubt in made.doubts:
        shown.print(f"doubt: {doubt}", soft_wrap=True, markup=False, highlight=False)
    if given.out:
        shown.print(f"written: {given.out}", soft_wrap=True, markup=False, highlight=False)


def _made(given: SimpleNamespace, console: Console) -> tuple[Plan, str]:
    if given.out:
        files.check_free(given.out)
    model = read_model(Path(given.model)) if given.model else None
    stock = _inventory(given, model)
    for name in ("ttft_ms", "tpot_ms"):
        if not 0 < getattr(given, name) <= _MOST_MS:
            raise PlanError(
                f"{name} {getattr(given, name)}: must be a number of milliseconds above 0, at most an hour; a plan needs both "
                "promises"
            )
    if not FEWEST <= given.requests <= _MOST_REQUESTS:
        said = f"must be {FEWEST} or more, for four windows, and at most {_MOST_REQUESTS:,}"
        raise PlanError(f"requests {given.requests}: {said}")
    if given.per_s is not None and not 0 < given.per_s < inf:
        raise PlanError(f"per_s {given.per_s}: must be a number above 0")
    create_order(given.order)
    create_policy(given.policy or DEFAULT, "")
    requests = _requests(given)
    _check_context(requests, model)
    promise = Promise(given.ttft_ms / 1e3, given.tpot_ms / 1e3)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with console.status("simulating") as status:
        made = make(
            stock, requests, promise, per_s=given.per_s or 0.0, each=given.requests // WINDOWS, order=given.order,
            policy=given.policy, say=say, ran=lambda runs: status.update(f"simulating: {runs} windows"),
        )  # fmt: skip
    return made, _served(given.model) or next(iter(stock.kinds.values())).model or "MODEL"


def _served(model: str) -> str:
    """What engines are told to serve: the model's folder, if its weights are there; empty: not known."""
    folder = Path(model) if os.path.isdir(model) else Path(model).parent
    return str(folder.absolute()) if model and any(folder.glob("*.safetensors")) else ""


def _inventory(given: SimpleNamespace, model: Model | None) -> inventory.Inventory:
    if given.inventory and given.device:
        raise PlanError("inventory and device: both are given; give one")
    if given.inventory:
        return inventory.load(given.inventory, model, force=given.force)
    if not given.device:
        raise PlanError(
            "inventory: none is given; name a file (--inventory), or --device and --gpus"
        )
    if model is None:
        raise PlanError("model: none is given; --device needs --model, the model's config.json")
    return inventory.one_device(given.device, given.gpus, model)


def _requests(given: SimpleNamespace) -> Sequence[Waiting]:
    """The trace, or one of two lengths."""
    lengths = (given.prompt_tokens, given.answer_tokens)
    if given.trace is not None:
        if any(length is not None for length in lengths):
            raise PlanError(
                "trace and lengths: both are given; give a trace, or --prompt-tokens and --answer-tokens"
            )
        return trace.load(given.trace)
    if any(length is None or length < 1 for length in lengths):
        raise PlanError(
            "trace: none is given; name a file, or give --prompt-tokens and --answer-tokens of 1 or more"
        )
    if not given.out:
        raise PlanError("out: none is given; a plan of two lengths writes its trace there")
    path = given.out / _trace_name(given)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_generated(*lengths, max(_GENERATED, given.requests))) + "\n")
    except OSError as error:
        raise PlanError(
            f"{given.out}: cannot be written ({error.strerror}); name another --out"
        ) from None
    return trace.load(path)


def _generated(prompt: int, answer: int, number: int = _GENERATED) -> Iterator[str]:
    """A trace in Azure's form: Poisson arrivals, lengths from half to one and a half times the mean."""
    random, at_s = Random(0), 0.0
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    for _ in range(number):
        at_s += random.expovariate(1.0)
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=at_s)
        tokens, more = (max(1, round(mean * random.uniform(0.5, 1.5))) for mean in (prompt, answer))
        yield f"{at:%Y-%m-%d %H:%M:%S.%f},{tokens},{more}"


def _trace_name(given: SimpleNamespace) -> str:
    if given.trace is None:  # a name that no recorded trace has
        return f"trace-{given.prompt_tokens}-{given.answer_tokens}.csv"
    return str(given.trace.absolute())


def _check_context(requests: Sequence[Waiting], model: Model | None) -> None:
    """Raises PlanError for requests that the model cannot serve."""
    if model is None or not model.context:
        return
    beyond = [
        request for request in requests if request.tokens + request.max_tokens > model.context
    ]
    if beyond:
        longest = max(request.tokens + request.max_tokens for request in beyond)
        raise PlanError(
            f"trace: {len(beyond):,} of {len(requests):,} requests are longer than the model's context of {model.context:,} "
            f"tokens (the longest has {longest:,}); leave them out, or plan for a model with a longer context"
        )


def _parameters() -> Iterator[Parameter]:
    argument = typer.Argument(help="trace file: Mooncake's JSON lines, or Azure's .csv")
    yield Parameter(
        "trace", Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, argument]
    )
    meaning = "nodes, devices, links, prices and power, and what may not be used (YAML)"
    yield option("inventory", Path | None, None, meaning, metavar="FILE")
    defaults = {"order": "srjf_calibrated"}
    for name, metavar, meaning in _TEXTS:
        yield option(name, str, defaults.get(name, ""), meaning, metavar=metavar)
    yield option("gpus", int, 8, "GPUs of --device", metavar="N")
    yield option("ttft-ms", float, 0.0, "promised time to first token", metavar="MS")
    yield option("tpot-ms", float, 0.0, "promised time per token", metavar="MS")
    meaning = "rate that must be kept; exit code 2 if no fleet keeps it. By default the highest is looked for"
    yield option("per-s", float | None, None, meaning, metavar="N")
    yield option("prompt-tokens", int | None, None, "mean prompt, in place of a trace", metavar="N")
    yield option("answer-tokens", int | None, None, "mean answer, in place of a trace", metavar="N")
    yield option("requests", int, 3000, "requests of all four windows together", metavar="N")
    yield option("force", bool, False, "use profiles with an error above 15 %; every page says so")
    yield option("out", Path | None, None, "folder for the files", metavar="FOLDER")


def _table(made: Plan) -> Table:
    columns = ("search", "fleet", "requests /s", "spread", "per GPU", "binds", "costs")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for row in made.rows:
        table.add_row(
            row.search, row.candidate.name, f"{row.per_s:.2f}", f"{min(row.windows):.1f} - {max(row.windows):.1f}",
            f"{row.per_s / row.gpus:.2f}", row.binds, ", ".join(made.sources),
        )  # fmt: skip
    return table


app = single(plan, _parameters())
