# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench`: one command for each benchmark, all with the same form of report."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_connector.bench import machine
from pd_connector.bench.handoff import BASELINE, Findings, Measurement
from pd_connector.bench.pair import BenchError, Contender, Pair
from pd_connector.bench.report import missed, table, write_json
from pd_connector.config import Config
from pd_connector.demo import MODEL_DIR
from pd_connector.errors import PDConnectorError
from pd_connector.launch import stop_services, terminate_as_interrupt, wait_all
from pd_connector.launch.service import log_folder

BAR_MISSED = 1
NOT_MEASURED = 2
INTERRUPTED = 130
"""Exit codes other than 0."""

PROMPT_TOKENS = (512, 2048, 3500)
QUIET_CORES = 0.1
"""What other programs may use before the figures are called provisional."""


class TransportName(StrEnum):
    """Transports of PDConnector."""

    SHM = "shm"
    TCP = "tcp"
    NIXL = "nixl"


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Measure PDConnector beside what there is otherwise, in one run.",
)


@app.callback()
def group() -> None:
    """Measure PDConnector beside what there is otherwise, in one run."""


@app.command()
def handoff(
    model: Annotated[str, typer.Option(help="Folder or name.", show_default="the demo's")] = str(
        MODEL_DIR
    ),
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Prompt length; may be repeated (512, 2048, 3500)."),
    ] = None,
    transport: Annotated[
        list[TransportName] | None,
        typer.Option(help="Transport of ours; each gets engines of its own (shm)."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each pair and length.")] = 9,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs before them, not counted.")] = 2,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Time from a finished prefill to the first decoded token, beside vLLM's NixlConnector.

    Starts a prefill and a decode engine for each side, all on this machine, and sends the same
    prompts through them in turn. Exit code 1 when a bar is missed, 2 when nothing was measured.
    """
    lengths = prompt_tokens or list(PROMPT_TOKENS)
    contenders = [BASELINE, *map(_ours, dict.fromkeys(transport or [_default_transport()]))]
    stdout, stderr = Console(), Console(stderr=True)
    with _exit_codes(stderr):
        _check_installed()
        findings = _measure(model, contenders, lengths, runs, warm_ups, stderr)
    stdout.print(table(findings.comparisons, BASELINE.connector))
    for note in _notes(findings):
        stdout.print(note, soft_wrap=True, highlight=False, markup=False)
    if json is not None:
        write_json(json, findings.comparisons)
    if missed(findings.comparisons):
        raise typer.Exit(BAR_MISSED)


def _measure(
    model: str,
    contenders: list[Contender],
    lengths: list[int],
    runs: int,
    warm_ups: int,
    console: Console,
) -> Findings:
    """Start all engines, measure, and end them again, whatever happens."""
    logs = log_folder()
    # A page more than the longest request, for the tokens that are decoded.
    max_model_len = max(4096, max(lengths) + 64)
    pairs = [Pair.of(contender, model, logs, max_model_len) for contender in contenders]
    engines = [engine for pair in pairs for engine in pair.engines]
    console.print(f"{len(engines)} engines, logs in {logs}", highlight=False)
    with terminate_as_interrupt():
        try:
            for engine in engines:
                engine.start()
            wait_all(engines, console=console)
            with console.status("warming up") as status:
                say = status.update if console.is_terminal else console.print
                return Measurement(pairs, runs, warm_ups, say).measure(lengths)
        finally:
            stop_services(engines)


@contextmanager
def _exit_codes(console: Console) -> Iterator[None]:
    try:
        yield
    except (PDConnectorError, OSError) as error:
        console.print(f"not measured: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(NOT_MEASURED) from None
    except KeyboardInterrupt:
        console.print("interrupted; all engines have been ended")
        raise typer.Exit(INTERRUPTED) from None


def _check_installed() -> None:
    """Raises BenchError naming what is missing: an engine says it only after half a minute."""
    for module, mend in (
        ("vllm", "install vLLM, or use the environment that has it"),
        ("nixl", "the baseline needs it: pip install 'pd-connector[nixl]'"),
    ):
        if importlib.util.find_spec(module) is None:
            raise BenchError(f"{module} is not installed: {mend}")


def _default_transport() -> TransportName:
    return TransportName(Config().transports[0])


def _ours(transport: TransportName) -> Contender:
    return Contender(str(transport), "PDConnector", {"transports": [str(transport)]})


def _notes(findings: Findings) -> list[str]:
    """What a reader of the table must know."""
    notes = [f"{topic}: {words}" for topic, words in machine.describe().items()]
    for name, cores in findings.rest_cores.items():
        frozen = " (spins: frozen while others were measured)" if name in findings.frozen else ""
        notes.append(f"cores that {name}'s engines use at rest: {cores:.2f}{frozen}")
    busy = findings.others_cores
    verdict = "quiet" if busy <= QUIET_CORES else "not quiet: the figures are provisional"
    notes.append(f"cores used by other programs meanwhile: {busy:.2f} ({verdict})")
    if findings.restless:
        notes.append(f"runs that began while some engine was busy: {findings.restless}")
    if findings.unlike:
        notes.append(f"prompts that the pairs answered differently: {findings.unlike}")
    return notes
