# SPDX-License-Identifier: Apache-2.0
"""`pd-connector profile`: measure the cost of prefill and decode on a running engine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pd_connector.errors import PDConnectorError
from pd_connector.tools.missing import what_to_install
from pd_connector.tools.output import checked

if TYPE_CHECKING:
    from pd_connector.tools.launch.client import Samples
    from scheduler_plugins.cost.profile import Measurement
    from scheduler_plugins.profile.facts import Facts
    from scheduler_plugins.profile.measure import Profile, Wanted

FAILED = 2
DOUBTFUL = 0.3
"""Error above which counting tokens is a better order than the model."""
_SHOWN = 8


def profile(
    url: Annotated[
        str, typer.Option(help="Base URL of the engine: http://127.0.0.1:8000", show_default=False)
    ] = "",
    out: Annotated[Path, typer.Option(help="File for the profile.", callback=checked)] = Path(
        "profile.json"
    ),
    longest_tokens: Annotated[
        int,
        typer.Option(
            min=64, help="Longest prompt in tokens, at most what the engine's context has room for."
        ),
    ] = 8192,
    most_batch: Annotated[
        int, typer.Option(min=1, help="Most sequences that decode together.")
    ] = 32,
    chunk_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="The engine's --max-num-batched-tokens. 0: the engine computes each prompt in one step.",
        ),
    ] = 0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Repetitions of each prefill and mixed step.")
    ] = 3,
    model: Annotated[
        str,
        typer.Option(
            help="The model's folder or config.json. By default the folder that the engine names, if it is here."
        ),
    ] = "",
    gpus: Annotated[
        int, typer.Option(min=1, help="GPUs of the engine: its --tensor-parallel-size.")
    ] = 1,
    start_s: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds of the engine's start. By default /metrics says.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="aisimulate: take step times from AISimulate's predictions, in place of --url; or aisimulate=PYTHON, the "
            "Python that has it. Needs --model and --device. The profile is called estimated.",
            show_default=False,
        ),
    ] = "",
    device: Annotated[
        str, typer.Option(help="With --from: the device, such as H100.", show_default=False)
    ] = "",
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", help="API key of the engine.", show_default=False),
    ] = None,
) -> None:
    """Time prefills, decode steps and steps with both on a running vLLM from outside, and fit the cost model.

    The engine must have no other traffic. `pd-router plan` reads the file (devices: profiles), the scheduler by
    --additional-config '{"pd_cost_model": "FILE"}'. Exit code 2 when nothing could be measured.
    """
    stderr = Console(stderr=True)
    for module in ("aiohttp", "numpy"):
        if importlib.util.find_spec(module) is None:
            stderr.print(f"{module} is not installed: {what_to_install(module)}", markup=False)
            raise typer.Exit(FAILED)
    from scheduler_plugins.cost.profile import ProfileError, save
    from scheduler_plugins.profile.facts import facts
    from scheduler_plugins.profile.measure import Wanted

    if bool(url) == bool(source):
        said = "give --url of an engine, or --from aisimulate: one of both"
        stderr.print(f"not measured: {said}", style="red", markup=False, highlight=False)
        raise typer.Exit(FAILED)
    if source:
        _estimate(source, model, device, gpus, chunk_tokens, out, stderr)
        return
    plan = Wanted(longest_tokens, most_batch, repeats, chunk_tokens)
    try:
        measured, samples, root = asyncio.run(_measure(url, api_key, plan, stderr))
        described = facts(
            measured.model,
            measured.errors,
            samples,
            model=model or root,
            gpus=gpus,
            start_s=start_s,
        )
        save(out, described.profile)
    except (PDConnectorError, ProfileError, OSError) as error:
        said = f"not measured: {error}"
        stderr.print(said, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(FAILED) from None
    _show(measured, described, out, Console())


def _estimate(
    source: str, model: str, device: str, gpus: int, chunk_tokens: int, out: Path, stderr: Console
) -> None:
    """Write the profile that AISimulate's predictions give."""
    from scheduler_plugins.cost.profile import ProfileError, save
    from scheduler_plugins.planner.errors import PlanError
    from scheduler_plugins.planner.estimate import CHUNK_TOKENS, read_model
    from scheduler_plugins.profile import aisimulate

    name, _, python = source.partition("=")
    try:
        if name != aisimulate.NAME:
            raise ProfileError(
                f"--from {source}: must be aisimulate, or aisimulate=/path/to/python"
            )
        if not model or not device:
            raise ProfileError("--from needs --model (a folder with config.json) and --device")
        sizes = read_model(Path(model))
        chunk = chunk_tokens or CHUNK_TOKENS
        described = aisimulate.profile(
            sizes, _known_as(model, sizes.name), device, gpus, chunk, python
        )
        save(out, described)
    except (ProfileError, PlanError, OSError) as error:
        said = f"not estimated: {error}"
        stderr.print(said, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(FAILED) from None
    errors = described.errors
    Console().print(
        f"estimated from {aisimulate.NAME}'s predictions, no engine was run: fitted to prefill {errors.prefill or 0:.1%}, "
        f"decode {errors.decode or 0:.1%}, mixed {errors.mixed or 0:.1%}\nwritten: {out}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _known_as(model: str, name: str) -> str:
    """The model's name on Hugging Face, if its config has one; else its folder."""
    folder = Path(model) if os.path.isdir(model) else Path(model).parent
    return name if "/" in name else str(folder.absolute())


async def _measure(
    url: str, api_key: str | None, plan: Wanted, console: Console
) -> tuple[Profile, Samples, str]:
    """What was measured, the engine's `/metrics`, and where it found its model."""
    from dataclasses import replace

    from scheduler_plugins.profile.client import connect
    from scheduler_plugins.profile.measure import DECODED, measure

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    async with connect(url, api_key) as client:
        fits = min(plan.longest_tokens, client.longest_tokens - DECODED)
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task("connected", total=None)

            def say(done: int, total: int, what: str) -> None:
                progress.update(task, completed=done, total=total, description=what)

            measured = await measure(client, replace(plan, longest_tokens=fits), say)
            return measured, await client.metrics(), client.root


def _show(measured: Profile, described: Facts, out: Path, console: Console) -> None:
    model = measured.model
    console.print(_table(measured.measured, measured))
    console.print(
        f"prefill of n tokens, p cached: {model.a * 1e6:.3g} us (n-p) + {model.b * 1e9:.3g} ns "
        f"(n^2-p^2) + {model.c * 1e3:.3g} ms a step\n"
        f"decode step: {model.d0 * 1e3:.3g} ms + {model.d1 * 1e3:.3g} ms a sequence + "
        f"{model.d2 * 1e9:.3g} ns a token of context",
        highlight=False,
    )
    if mixed := model.mixed:
        console.print(
            f"step with both: {mixed.m0 * 1e3:.3g} ms + {mixed.m1 * 1e3:.3g} ms a sequence + {mixed.m2 * 1e9:.3g} ns a "
            "token of context + its prompt tokens as above",
            highlight=False,
        )
    else:
        console.print("steps with both were not measured: they count as the sum", highlight=False)
    profile = described.profile
    console.print(
        f"room for {profile.kv_tokens:,.0f} tokens, {profile.kv_bytes_per_token:,.0f} bytes a token, start "
        f"{profile.start_s:g} s, {profile.gpus} GPU",
        highlight=False,
    )
    for reason in described.unknown:
        console.print(f"not known: {reason}", highlight=False, markup=False, soft_wrap=True)
    for reason in measured.left_out:
        console.print(f"left out: {reason}", highlight=False, markup=False)
    if not measured.engine.caches:
        console.print(
            "cached prefixes could not be timed: the engine had none of them cached any more"
        )
    error = model.error or 0.0
    style = "red" if error > DOUBTFUL else "green"
    by_kind = ", ".join(
        f"{kind} {part:.1%}"
        for kind in ("prefill", "decode", "mixed")
        if (part := getattr(measured.errors, kind)) is not None
    )
    console.print(
        f"mean error on measurements that were not fitted: [{style}]{error:.1%}[/] ({by_kind})"
    )
    if error > DOUBTFUL:
        console.print("too large to order requests by: measure again while the machine is idle")
    console.print(f"written: {out}", highlight=False, soft_wrap=True, markup=False)


def _table(measured: Sequence[Measurement], fitted: Profile) -> Table:
    """Some of the measurements beside the model's predictions."""
    table = Table("what", "measured ms", "model ms", "off", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for kind in ((True, False), (False, True), (True, True)):
        some = [it for it in measured if (it.load.tokens > 0, it.load.batch > 0) == kind]
        for measurement in some[:: max(1, len(some) // _SHOWN)]:
            load = measurement.load
            if load.batch:
                what = f"decode {load.batch} x {load.context // load.batch:,}"
                what += f" and {load.tokens:,} of a prompt" if load.tokens else ""
                wanted_s = fitted.model.step_s(load)
            else:
                length = (load.pairs // load.tokens + load.tokens) // 2
                what = f"prefill {length:,}, {length - load.tokens:,} cached"
                wanted_s = fitted.model.prefill_s(length, length - load.tokens)
            off = wanted_s / measurement.duration_s - 1
            table.add_row(
                what, f"{measurement.duration_s * 1e3:.1f}", f"{wanted_s * 1e3:.1f}", f"{off:+.0%}"
            )
    return table
