# SPDX-License-Identifier: Apache-2.0
"""`pd-connector bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_bench.command_output import exit_codes, noise_note, report
from pd_bench.serve.bench import ServeBench
from pd_bench.serve.hosts import MOONCAKE, REDIS, HostsBench, HostsFindings
from pd_bench.serve.hosts import SCALE as HOSTS_SCALE
from pd_bench.serve.measure import Plan, ServeFindings
from pd_bench.serve.pool import PoolServeBench
from pd_bench.serve.pool_turns import AGAIN, PLAIN, POOL
from pd_bench.serve.stack import PARTS, RIVAL
from pd_connector.tools.cli.app import fail
from pd_connector.tools.output import Json

LOADS = (0.5, 0.8, 1.1)
SCALE = 32.0
POOL_LOADS = (0.5,)
POOL_SCALE = 16.0
"""A chunk of the pool has 128 tokens: prompts have to be longer than that."""


def serve(
    trace: Annotated[Path, typer.Argument(help="A trace in Mooncake's form (JSON lines).")],
    peer_env: Annotated[
        Path, typer.Option(help="Virtual environment that has vllm-router.")
    ] = Path("vllm-router-env"),
    load: Annotated[
        list[float] | None,
        typer.Option(
            min=0.05,
            help="Share of the rival's capacity; may be repeated (0.5, 0.8, 1.1).",
            show_default=False,
        ),
    ] = None,
    pool: Annotated[
        bool,
        typer.Option(
            "--pool",
            help="Compare our stack with a KV pool and without, and after its engines have died.",
        ),
    ] = False,
    far: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Two hosts with this store between their KV pools ({REDIS}, {MOONCAKE}), under faults: counts, no speeds.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=10, help="Requests of one run.")] = 50,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with other requests.")] = 3,
    scale: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Divisor of the trace's lengths (32; with --pool 16, with --far 16).",
            show_default=False,
        ),
    ] = None,
    link_mbit: Annotated[
        float, typer.Option(min=1.0, help="Rate of the link each way, in Mbit/s.")
    ] = 1000.0,
    json: Json = None,
) -> None:
    """Compare whole serving stacks, as users see them: ours beside vLLM's own, under a trace's load.

    Ours: PDConnector (codec auto), its router, PrefixAwareScheduler. Theirs: NixlConnector,
    vllm-router, vLLM's scheduler. Each has a prefill and a decode engine in two network namespaces
    joined by a limited link (needs root). Both serve the same requests in turn, at shares of the
    rival's capacity. Exit code 1 when a bar is missed, 2 when nothing was measured.

    With --pool both sides are ours, on this host and without a link: with a KV pool and without, at
    shares (0.5) of what the one without completes. After all rounds both engines with the pool are
    killed, and the same requests come again.

    With --far two namespaces are hosts, each with two unlike engines and a carrier, and our router is in
    front of them (needs root). The store's server is killed and returns while the trace is served, then
    carriers are killed, then one host dies with its memory and the trace comes again. Exit code 1 if a
    request was lost, an answer differs from one engine's, or nothing came from the other host.
    """
    stderr = Console(stderr=True)
    if far is not None:
        if far not in (REDIS, MOONCAKE):
            fail(f"--far {far}: must be {REDIS} or {MOONCAKE}")
        _serve_hosts(HostsBench(trace, far, requests, scale or HOSTS_SCALE, link_mbit), stderr)
        return
    if pool:
        _serve_pool(
            PoolServeBench(trace, Plan(load or POOL_LOADS, requests, rounds, scale or POOL_SCALE)),
            stderr,
            json,
        )
        return
    bench = ServeBench(
        trace, peer_env, link_mbit, Plan(load or LOADS, requests, rounds, scale or SCALE)
    )
    with exit_codes(stderr):
        version = bench.check()
        findings = bench.measure(stderr)
    report([(RIVAL, findings.comparisons)], _notes(bench, version, findings), json)


def _serve_hosts(bench: HostsBench, stderr: Console) -> None:
    with exit_codes(stderr):
        findings = bench.run(stderr)
    for line in _hosts_lines(findings):
        print(line)
    if not findings.is_good:
        raise typer.Exit(1)


def _hosts_lines(findings: HostsFindings) -> list[str]:
    """What two hosts have done, for people."""
    carriers = [
        ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()) if number)
        for counts in findings.carriers
    ]
    return [
        f"{findings.sent} requests: {findings.lost} lost, {findings.unequal} answers differ from one engine's",
        *(f"  lost {number} times: {failure}" for failure, number in findings.failures.items()),
        f"first turn: {findings.first[0]:,.0f} chunks loaded, {findings.first[1]:,.0f} of them from the far store",
        f"after a host's death: {findings.again[0]:,.0f} chunks loaded, {findings.again[1]:,.0f} of them from the far store",
        f"  {findings.named:,.0f} decisions of the router named it; {findings.not_worth:,.0f} chunks were computed, because that is faster",
        *(f"carrier {name}: {counts}" for name, counts in zip("ab", carriers, strict=False)),
    ]


def _serve_pool(bench: PoolServeBench, stderr: Console, json: Path | None) -> None:
    with exit_codes(stderr):
        measured = bench.measure(stderr)
    named, requests_sent = measured.named
    notes = [
        "both: PDConnector (codec raw, float32), pd-router, PrefixAwareScheduler, on one host",
        f"load 1.0: {measured.capacity:.2f} requests/s, the capacity without a pool",
        f"{AGAIN}: {named:.0f} of {requests_sent} decisions of the router named the pool",
        f"{AGAIN}: engines loaded {measured.loaded:,.0f} chunks",
        *(
            f"failed {count} times, {name}: {failure}"
            for name, failed in measured.failed.items()
            for failure, count in failed.items()
        ),
        noise_note(measured.others_cores),
    ]
    report([(PLAIN, measured.first), (f"{POOL}, before", measured.again)], notes, json)


def _notes(bench: ServeBench, version: str, findings: ServeFindings) -> list[str]:
    """Notes that a reader of the table must know."""
    promise = findings.promise
    in_time = (
        f"first token within {promise.ttft_s:.2f} s, then {promise.tpot_s * 1e3:.0f} ms a token"
    )
    notes = [
        *(f"{name}: {parts}" for name, parts in PARTS.items()),
        f"vllm-router {version}",
        f"link: {bench.link_mbit:,.0f} Mbit/s each way, between two network namespaces",
        f"load 1.0: {findings.capacity:.2f} requests/s, the rival's capacity",
        f"goodput: {in_time} (5 and 2 times the rival's times on idle engines)",
    ]
    for name, cores in findings.rest_cores.items():
        notes.append(f"cores at rest, {name}: {cores:.2f}")
    for name, sources in findings.sources.items():
        total = sum(sources.values()) or 1.0
        parts = ", ".join(f"{source} {value / total:.1%}" for source, value in sources.items())
        notes.append(f"prompt tokens of the decode engine, {name}: {parts}")
    for name, failed in findings.failed.items():
        for failure, count in failed.items():
            notes.append(f"failed {count} times, {name}: {failure}")
    notes.append(noise_note(findings.others_cores))
    return notes
