# SPDX-License-Identifier: Apache-2.0
"""Each router with the same requests in front of fresh engines, in rotation."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from pd_bench.report import BenchError, Compared, Comparison, Say
from pd_bench.router import scaled
from pd_bench.router.contenders import OURS, Contender, Engines
from pd_bench.router.mocks import MockProcess, PrefixHits, prefix_hits
from pd_bench.router.scaled import Sent
from pd_bench.router.sending import Outcome, play
from pd_bench.router.truth import Seen
from pd_bench.sample import Sample
from pd_connector.tools.launch import Service, stop_services
from pd_connector.tools.launch.service import log_folder
from scheduler_plugins.cost.profile import save

MOST_FAILED = 0.01
_READY_S = 60.0


class Window(NamedTuple):
    """Requests of a run that are evaluated together."""

    first: int
    end: int
    mean_bar: float | None = None
    p99_bar: float | None = None

    @property
    def name(self) -> str:
        return f"{self.first + 1:,}-{self.end:,}"


COLD, WARM = Window(0, 2500, 0.90, 0.90), Window(5000, 7500, 0.80, 0.90)


def windows(requests: int) -> list[Window]:
    """The windows with bars that have enough requests; otherwise one window of all requests."""
    return [window for window in (COLD, WARM) if window.end <= requests] or [Window(0, requests)]


@dataclass(frozen=True)
class Measured:
    """One router in one rotation."""

    outcomes: Sequence[Outcome]
    hits: Mapping[Window, float]


class Cluster(NamedTuple):
    """Routers with their engines, all ready."""

    routers: Sequence[Service]
    prefill: Sequence[MockProcess]
    decode: Sequence[MockProcess]

    @property
    def router(self) -> Service:
        """The first one."""
        return self.routers[0]


@contextmanager
def cluster(contenders: Sequence[Contender], speed: float) -> Iterator[Cluster]:
    """Fresh engines with empty caches, as the first contender needs them, with the contenders' routers in front. All
    are ended afterwards."""
    contender = contenders[0]
    logs = log_folder()
    costs, profile = logs / "costs.json", logs / "profile.json"
    save(costs, scaled.costs())
    save(profile, scaled.costs(speed))

    def mocks(side: str, count: int) -> list[MockProcess]:
        return [
            MockProcess(f"{side}{n}", costs, speed, logs / f"{side}{n}.log", contender.mock_args)
            for n in range(count)
        ]

    prefill, decode = mocks("p", contender.prefill), mocks("d", contender.decode)
    fronts = [
        contender.router(Engines(prefill, decode, profile, logs / f"router{n}.log"))
        for n, contender in enumerate(contenders)
    ]
    services = [*prefill, *decode, *fronts]
    try:
        for group in ([*prefill, *decode], fronts):
            for service in group:
                service.start()
            for service in group:
                service.wait_ready(_READY_S)
        # A router may report that it is ready before it has checked its engines.
        first = {"model": "mock", "prompt": "0000", "max_tokens": 1}
        for front in fronts:
            front.client.post("/v1/completions", first, 30.0)
        yield Cluster(fronts, prefill, decode)
    finally:
        stop_services(services, polite_s=8.0)


def measure(
    contender: Contender,
    requests: Sequence[Sent],
    windows: Sequence[Window],
    speed: float,
    say: Say,
) -> Measured:
    """One run of one router. `say` gets the progress.

    Raises:
        BenchError: more than one in a hundred requests failed.
    """
    hits_at: dict[int, Future[PrefixHits]] = {}
    with ThreadPoolExecutor(1) as asking, cluster([contender], speed) as running:
        edges = {edge for window in windows for edge in (window.first, window.end)}
        tenth = max(1, len(requests) // 10)

        def note(number: int) -> None:
            if number and number % tenth == 0:
                say(f"{contender.name}: {number:,} of {len(requests):,} requests sent")
            if number in edges:
                hits_at[number] = asking.submit(prefix_hits, running.prefill)

        outcomes = asyncio.run(play([running.router.base_url], requests, speed, note))
        hits_at[len(requests)] = asking.submit(prefix_hits, running.prefill)
        caches = {number: future.result() for number, future in hits_at.items()}
    failed = [outcome for outcome in outcomes if not outcome.served]
    if len(failed) > MOST_FAILED * len(outcomes):
        raise BenchError(
            f"{contender.name}: {len(failed)} of {len(outcomes)} requests failed, the first: "
            f"{failed[0].status} {failed[0].error}; see {running.router.log_path}"
        )
    hits = {window: caches[window.end].since(caches[window.first]) for window in windows}
    return Measured(outcomes, hits)


def rotate(
    contenders: Sequence[Contender],
    requests: Sequence[Sent],
    windows: Sequence[Window],
    rotations: int,
    speed: float,
    say: Say,
) -> dict[str, list[Measured]]:
    """Every router once in each rotation, by name. Each rotation begins with another router."""
    results: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
    runs, run_s = rotations * len(contenders), requests[-1].at_s / speed
    say(f"{runs} runs of {run_s / 60:.1f} minutes each")
    for number in range(rotations):
        for at in range(len(contenders)):
            contender = contenders[(number + at) % len(contenders)]
            results[contender.name].append(run := measure(contender, requests, windows, speed, say))
            for window in windows:
                mean, p99 = times(run, window)
                say(
                    f"rotation {number + 1}, {contender.name}, requests {window.name}: TTFT mean {mean:.2f} s, "
                    f"p99 {p99:.1f} s, hit {run.hits[window]:.3f}"
                )
    return results


def times(run: Measured, window: Window) -> tuple[float, float]:
    """Mean and 99th percentile of the TTFT in a window, in seconds."""
    all_s = [
        outcome.ttft_s for outcome in run.outcomes[window.first : window.end] if outcome.served
    ]
    return statistics.mean(all_s), statistics.quantiles(all_s, n=100, method="inclusive")[98]


def seen(runs: Sequence[Measured], windows: Sequence[Window]) -> list[Seen]:
    """The medians of all runs of one router, for each window."""
    return [
        Seen(
            statistics.median(times(run, window)[0] for run in runs),
            statistics.median(run.hits[window] for run in runs),
        )
        for window in windows
    ]


def compared(
    results: Mapping[str, Sequence[Measured]], windows: Sequence[Window]
) -> list[Compared]:
    """Our router beside each peer. A bar applies only to the best peer in that figure."""
    peers = [name for name in results if name != OURS]
    tables: dict[str, list[Comparison]] = {name: [] for name in peers}
    for window in windows:
        for index, (name, bar) in enumerate(
            (("TTFT mean", window.mean_bar), ("TTFT p99", window.p99_bar))
        ):
            samples = {
                who: Sample(tuple(times(run, window)[index] for run in runs))
                for who, runs in results.items()
            }
            best = min(peers, key=lambda who: samples[who].median)
            for who in peers:
                held = bar if who == best else None
                params = {"requests": window.name}
                tables[who].append(Comparison(name, params, samples[OURS], samples[who], "s", held))
        for who in peers:
            hits = [
                Sample(tuple(run.hits[window] for run in results[side])) for side in (OURS, who)
            ]
            params = {"requests": window.name}
            tables[who].append(Comparison("hit", params, hits[0], hits[1], "", None, True))
    return list(tables.items())
