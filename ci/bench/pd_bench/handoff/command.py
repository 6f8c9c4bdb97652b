# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench handoff`: the handoff of a request between two engines, beside the engine's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import NOT_MEASURED, exit_codes, noise_note, report
from pd_bench.handoff import cross, ray, sglang, vllm
from pd_bench.handoff.bench import HandoffBench
from pd_bench.handoff.contender import Contender, Contenders
from pd_bench.handoff.findings import HandoffFindings
from pd_bench.netns import available
from pd_bench.report import BenchError
from pd_connector.tools.launch.family import terminate_as_interrupt
from pd_connector.tools.output import Json

PROMPT_TOKENS = (512, 2048, 3500)


class EngineName(StrEnum):
    """Engines between which handoffs are measured."""

    VLLM = "vllm"
    SGLANG = "sglang"
    CROSS = "cross"


class Orchestrator(StrEnum):
    """A program that may place engines and send them requests instead of this benchmark."""

    RAY = "ray"


_LINE_UPS = {
    (EngineName.VLLM, False): vllm.LINK,
    (EngineName.VLLM, True): vllm.LOCAL,
    (EngineName.SGLANG, False): sglang.LINK,
    (EngineName.SGLANG, True): sglang.LOCAL,
    (EngineName.CROSS, False): cross.LINK,
}
"""Line-ups by engine, and by whether both engines are on one machine."""


def handoff(
    ours: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Contender to compare; may be repeated. Over the link: "
            f"{', '.join(vllm.LINK.ours)}; with --local: {', '.join(vllm.LOCAL.ours)} "
            f"({', '.join(vllm.LOCAL.default)}); with --engine sglang: "
            f"{', '.join(sglang.LINK.ours)}; with --engine cross: {', '.join(cross.LINK.ours)}; "
            f"with --on ray: {', '.join(ray.CONTENDERS)}; with --gpu: "
            "codecs (raw, fp8_e4m3, int8), or whole agents (agent-device, agent-host: where their "
            "slots lie).",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="Engines that hand over; `cross`: vLLM and SGLang to each other, beside pairs of one kind."
        ),
    ] = EngineName.VLLM,
    on: Annotated[
        Orchestrator | None,
        typer.Option(
            help="Measure time to first token through `ray`: Ray Serve on two nodes, beside its own NIXL.",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=2,
            help="Prompt length; may be repeated (512, 2048, 3500; with --gpu 512, 7500, 32000).",
        ),
    ] = None,
    link_mbit: Annotated[
        float, typer.Option(min=1.0, help="Rate of the link each way, in Mbit/s; without --local.")
    ] = 1000.0,
    local: Annotated[
        bool, typer.Option("--local", help="On one machine, without namespaces and link.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or name (8 layers x 8 KV heads x 128 with random weights; for vLLM with "
            "--local the demo's).",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Without engines: between two processes on a GPU, over NIXL."),
    ] = False,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="With --gpu: device of both processes, or, given twice, of the producer and the "
            "consumer (cuda:0); cpu tries the benchmark in host memory.",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each pair and length.")] = 5,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs before them, not counted.")] = 1,
    json: Json = None,
) -> None:
    """Time from a finished prefill to the first decoded token, beside the engine's own NIXL.

    Starts a prefill and a decode engine for each side, in two network namespaces joined by a limited
    link (needs root), and sends the same prompts through them. With --gpu only KV moves, between two
    processes without engines. Exit code 1 when a bar is missed, 2 when nothing was measured.
    """
    if on is not None:
        if gpu or local or model or engine is not EngineName.VLLM:
            problem = "not together with --gpu, --local, --model or --engine"
            raise typer.BadParameter(problem, param_hint="--on")
        _handoff_on_ray(ours, prompt_tokens, link_mbit, runs, warm_ups, json)
        return
    if gpu:
        if local or model or engine is not EngineName.VLLM:
            problem = "not together with --local, --model or --engine"
            raise typer.BadParameter(problem, param_hint="--gpu")
        _handoff_on_gpu(ours, prompt_tokens, _devices(device), runs, warm_ups, json)
        return
    if device:
        raise typer.BadParameter("only with --gpu", param_hint="--device")
    if (engine, local) not in _LINE_UPS:
        raise typer.BadParameter(f"{engine}: measured over a link only", param_hint="--local")
    line_up = _LINE_UPS[engine, local]
    if line_up is vllm.LINK and link_mbit >= vllm.FAST_MBIT:
        line_up = vllm.FAST_LINK
    bench = HandoffBench(
        line_up,
        _chosen(ours, line_up.ours, line_up.default),
        None if local else link_mbit,
        model,
        prompt_tokens or PROMPT_TOKENS,
        runs,
        warm_ups,
    )
    stderr = Console(stderr=True)
    with exit_codes(stderr):
        _check_possible(bench)
        findings = bench.measure(stderr)
    report(findings.tables, _notes(bench, findings), json)
    if findings.failures:
        raise typer.Exit(NOT_MEASURED)


def _handoff_on_gpu(
    codecs: Sequence[str] | None,
    prompt_tokens: Sequence[int] | None,
    devices: tuple[str, str],
    runs: int,
    warm_ups: int,
    json: Path | None,
) -> None:
    from pd_bench.gpu import bench as gpu  # torch takes seconds to import

    for name in codecs or ():
        if name not in (*gpu.CODECS, *gpu.AGENTS):
            names = ", ".join((*gpu.CODECS, *gpu.AGENTS))
            raise typer.BadParameter(f"{name!r}: must be one of {names}", param_hint="--ours")
    lengths = prompt_tokens or gpu.PROMPT_TOKENS
    bench = gpu.GpuBench(devices, codecs or gpu.CODECS, lengths, runs, warm_ups)
    stderr = Console(stderr=True)
    with exit_codes(stderr), terminate_as_interrupt():
        measured = bench.measure(lambda line: stderr.print(line, markup=False, highlight=False))
        notes = [*bench.notes(), noise_note(measured.others_cores)]
    report(measured.tables, notes, json)


def _devices(names: Sequence[str] | None) -> tuple[str, str]:
    """The devices of the producer and the consumer."""
    devices = list(names or ["cuda:0"])
    for name in devices:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
            problem = f"{name!r}: must be cuda, cuda:1 or the like, or cpu"
            raise typer.BadParameter(problem, param_hint="--device")
    if len(devices) > 2 or len({name.partition(":")[0] for name in devices}) > 1:
        problem = f"{devices}: must be one, or the producer's and the consumer's, of one kind"
        raise typer.BadParameter(problem, param_hint="--device")
    return devices[0], devices[-1]


def _handoff_on_ray(
    codecs: Sequence[str] | None,
    prompt_tokens: Sequence[int] | None,
    link_mbit: float,
    runs: int,
    warm_ups: int,
    json: Path | None,
) -> None:
    ours = _chosen(codecs, ray.CONTENDERS, tuple(ray.CONTENDERS))
    bench = ray.RayBench(ours, link_mbit, prompt_tokens or PROMPT_TOKENS, runs, warm_ups)
    stderr = Console(stderr=True)
    with exit_codes(stderr), terminate_as_interrupt():
        _check(bench.problem(), over_link=True)
        measured = bench.measure(lambda line: stderr.print(line, markup=False, highlight=False))
    capacity = f"{measured[0].capacity:.2f} requests/s, the baseline's capacity"
    notes = [
        f"link: {link_mbit:,.0f} Mbit/s each way, between two Ray nodes in network namespaces",
        f"requests: answered a second while {ray.AT_ONCE} are under way",
        f"load {ray.LOAD:g}: of {capacity}",
        noise_note(max(application.others_cores for application in measured)),
    ]
    report([(ray.BASELINE.name, ray.compared(measured))], notes, json)


def _chosen(
    names: Sequence[str] | None, contenders: Contenders, default: Sequence[str]
) -> list[Contender]:
    for name in names or ():
        if name not in contenders:
            raise typer.BadParameter(
                f"{name!r}: must be one of {', '.join(contenders)}", param_hint="--ours"
            )
    return [contenders[name] for name in dict.fromkeys(names or default)]


def _check_possible(bench: HandoffBench) -> None:
    _check(bench.line_up.problem(), over_link=bench.link_mbit is not None)


def _check(problem: str, *, over_link: bool) -> None:
    """Raises BenchError that names what is missing. An engine would report it only after half a minute."""
    if problem:
        raise BenchError(problem)
    if over_link and (reason := available()):
        raise BenchError(
            f"no network namespaces here ({reason}): run it as root with iproute2 installed, or "
            "compare on one machine with --local"
        )


def _notes(bench: HandoffBench, findings: HandoffFindings) -> list[str]:
    """Notes that a reader of the table must know."""
    notes = []
    if bench.link_mbit is not None:
        notes.append(
            f"link: {bench.link_mbit:,.0f} Mbit/s each way, between two network namespaces"
        )
    rest = {series.contender.name: series for series in findings.series}
    for name, series in rest.items():
        frozen = " (spins: frozen while others were measured)" if series.frozen else ""
        notes.append(f"cores that {name}'s engines use at rest: {series.rest_cores:.2f}{frozen}")
    notes.append(noise_note(findings.others_cores))
    notes += [f"NOT MEASURED: {name}: {reason}" for name, reason in findings.failures.items()]
    if findings.drift:
        drift = ", ".join(f"{ratio:.2f} at {n:,} tokens" for n, ratio in findings.drift.items())
        baseline = next(iter(bench.line_up.baselines))
        notes.append(f"{baseline}'s handoff when measured last / first: {drift}")
    if findings.restless:
        notes.append(f"runs that began while some engine was busy: {findings.restless}")
    if findings.unlike:
        notes.append(f"prompts that the pairs answered differently: {findings.unlike}")
    return notes
