# SPDX-License-Identifier: Apache-2.0
"""The present problems of a fleet, worst first, with advice. The live page shows them.

Each trouble has the name of an alert in docs/alerts.md, which says more. Prometheus' rules find the same troubles over
a longer time (docs/alerts.yaml).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from scheduler_plugins.router.endpoints.trends import Recent
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.role_state import Decision
from scheduler_plugins.router.policies.base import Role

MOST_RECOMPUTED = 0.05
"""Share of requests to pairs that may be recomputed."""
MOST_LATE = 0.05
"""Share of prompts that may go to engines without a GPU because all others would be late."""
MOST_REFUSED = 0.05
"""Share of requests that may be refused."""
LEAST_ENDED = 20
"""A share says something from this count on."""
FULL = 0.95
"""Share of a cache in use from which running requests are preempted soon."""
MOST_LEASED = 0.5
"""Share of a cache that may be kept for decode engines."""
FLAPS = 4
"""This many changes of one engine's role within `FLAP_S` are too many."""
FLAP_S = 1800.0

Level = Literal["critical", "warning"]
_LEVELS: tuple[Level, ...] = ("critical", "warning")


class Diagnostic(NamedTuple):
    """Something that is wrong."""

    alert: str
    level: Level
    what: str
    where: tuple[str, ...]  # engines, each with what is known of it; empty: the fleet
    do: str


def troubles(
    engines: Sequence[BackendEngine],
    decisions: Collection[Decision],
    recent: Recent,
    late: float,
    now_s: float,
) -> list[Diagnostic]:
    """The present problems, worst first. Engines with the same problem are named together.

    Args:
        recent: sums of the last minutes.
        late: share of the prompts that engines without a GPU computed because all others would have been late.
        now_s: time on the event loop's clock.
    """
    diagnostics = [*_of_sides(engines), *_of_requests(recent), *_of_roles(decisions, now_s)]
    if late > MOST_LATE:
        diagnostics.append(_gpus_missing(late))
    for engine in engines:
        diagnostics += _of_engine(engine, now_s)
    together = dict[tuple[str, ...], Diagnostic]()
    for diagnostic in diagnostics:
        same = together.setdefault((diagnostic.alert, diagnostic.what, diagnostic.do), diagnostic)
        if same is not diagnostic:
            together[diagnostic.alert, diagnostic.what, diagnostic.do] = same._replace(
                where=same.where + diagnostic.where
            )
    return sorted(together.values(), key=lambda diagnostic: _LEVELS.index(diagnostic.level))


def _of_sides(engines: Iterable[BackendEngine]) -> Iterator[Diagnostic]:
    up = [engine for engine in engines if engine.up and not engine.draining]
    if not any(engine.serves(Role.DECODE) for engine in up):
        alone = any(engine.computes_prompts for engine in up)
        yield Diagnostic(
            "PDNoDecodeEngine",
            "critical",
            "No decode engine is up: prefill engines answer alone."
            if alone
            else "No engine can answer: clients get 503.",
            (),
            "Start a decode engine, or look at the log of the engines that are down.",
        )
    elif not any(engine.hands_over and engine.address is not None for engine in up):
        yield Diagnostic(
            "PDNothingHandedOver",
            "critical",
            "No prefill engine hands KV over: decode engines compute all prompts.",
            (),
            "Start a prefill engine with PDConnector, or look at the log of the engines that are down.",
        )


def _of_engine(engine: BackendEngine, now_s: float) -> Iterator[Diagnostic]:
    url, traffic = engine.url, engine.traffic
    if not engine.up:
        since = f"for {_length(now_s - engine.down_since)}, " if engine.down_since else ""
        yield Diagnostic(
            "PDEngineAway",
            "warning",
            "Engines are down.",
            (f"{url}: {since}{engine.reason}",),
            "Look at the engine's log and restart it, or take it out of the router's settings.",
        )
        return
    if engine.hands_over and engine.address is None and not engine.draining:
        yield Diagnostic(
            "PDPrefillWithoutAddress",
            "warning",
            "Prefill engines hand no KV over.",
            (f"{url}: {engine.reason}",),
            "Start the engine with PDConnector and kv_role kv_producer or kv_both.",
        )
    if engine.role_state.problem:
        yield Diagnostic(
            "PDRoleMoveFails",
            "warning",
            "Engines are not on the side that the settings say.",
            (engine.role_state.problem,),
            "Do what the line of the engine says.",
        )
    if engine.circuit.cause:
        yield Diagnostic(
            "PDEnginePaused",
            "warning",
            "Engines that answer health checks fail requests, so they get a pause.",
            (f"{url}: {engine.circuit.cause}",),
            "Look for the error in the engine's log. The router tries it again by itself.",
        )
    if engine.warning:
        what, _, do = engine.warning.partition(". What to do: ")
        alert = "PDFailingRanks" if traffic.failing else "PDNoTransfers"
        yield Diagnostic(alert, "critical", f"{what[:1].upper()}{what[1:]}.", (url,), do)
    if traffic.distrusted:
        yield Diagnostic(
            "PDDistrustedProducer",
            "critical",
            "An audit found wrong KV of a prefill engine. Its prompts are computed again.",
            (f"{url}: distrusts {traffic.distrusted:.0f} ranks",),
            "Compare checkpoints, flags and hardware of both engines, and restart the wrong one. The log names what differs.",
        )
    yield from _of_memory(engine)


def _of_memory(engine: BackendEngine) -> Iterator[Diagnostic]:
    url, traffic = engine.url, engine.traffic
    used = traffic.cache_used or 0.0
    if engine.serves(Role.DECODE) and used >= FULL:
        yield Diagnostic(
            "PDCacheFull",
            "warning",
            "KV caches are full: requests wait or are preempted.",
            (f"{url}: {used:.0%} in use",),
            "Add a decode engine, move one from prefill, or shorten contexts.",
        )
    if traffic.pages and traffic.leased_pages > MOST_LEASED * traffic.pages:
        yield Diagnostic(
            "PDLeasesPileUp",
            "warning",
            "Much of a KV cache is kept for decode engines that do not fetch it.",
            (f"{url}: {traffic.leased_pages / traffic.pages:.0%} of its pages",),
            "Look whether decode engines are up and reach it. Lower lease_s if clients often leave.",
        )
    if traffic.unsaved in ("full", "quota"):
        yield Diagnostic(
            "PDPoolFull",
            "warning",
            "The KV pool of a host takes no chunks.",
            (f"{url}: {traffic.unsaved}",),
            "Give the pool more memory or disk, or unpin chunks.",
        )
    elif traffic.unsaved or traffic.pool_stalls:
        yield Diagnostic(
            "PDPoolSilent",
            "warning",
            "The KV pool of a host does not answer.",
            (f"{url}: {traffic.unsaved or 'late'}",),
            "Run `pd-connector pool status` on that host. Look for a stopped engine that holds the pool.",
        )


def _of_requests(recent: Recent) -> Iterator[Diagnostic]:
    ended = sum(count for outcome, count in recent.outcomes.items() if outcome != "aborted")
    share = recent.outcomes.get("recomputed", 0.0) / ended if ended else 0.0
    if ended >= LEAST_ENDED and share > MOST_RECOMPUTED:
        yield Diagnostic(
            "PDRecomputed",
            "warning",
            f"KV of {share:.0%} of requests to pairs did not arrive: decode engines computed the prompts again.",
            (),
            "Look at pd_router:handoffs_total by cause, and set what docs/configuration.md says for it.",
        )
    if recent.arrivals >= LEAST_ENDED and recent.refusals > MOST_REFUSED * recent.arrivals:
        yield Diagnostic(
            "PDRequestsRefused",
            "warning",
            f"{recent.refusals / recent.arrivals:.0%} of requests are refused for lack of room or time.",
            (),
            "Add engines, or lower what the classes promise.",
        )


def _gpus_missing(late: float) -> Diagnostic:
    return Diagnostic(
        "PDGPUsMissing",
        "warning",
        f"{late:.0%} of the prompts of the last ten minutes went to engines without a GPU, because all others would have "
        "been late.",
        (),
        "Add GPUs.",
    )


def _of_roles(decisions: Iterable[Decision], now_s: float) -> Iterator[Diagnostic]:
    made = [decision for decision in decisions if now_s - decision.at_s < FLAP_S]
    moves = Counter(decision.engine for decision in made if decision.outcome == "done")
    flapping = [engine for engine, count in moves.items() if count >= FLAPS]
    if flapping:
        yield Diagnostic(
            "PDRolesFlap",
            "warning",
            f"Engines change their roles back and forth: {FLAPS} times and more in {_length(FLAP_S)}.",
            tuple(flapping),
            "Set `roles` to a calmer policy or to off, or give the group more engines.",
        )
    failed = [
        decision
        for decision in made
        if decision.outcome not in ("done", "moving", "dry run", "given up")
    ]
    if failed:
        last = failed[-1]
        yield Diagnostic(
            "PDRoleMoveFails",
            "warning",
            "A change of role failed.",
            (f"{last.engine}: {last.outcome}",),
            "Look at the engine's log. It keeps its old role until the next try.",
        )


def _length(seconds: float) -> str:
    """A length of time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
