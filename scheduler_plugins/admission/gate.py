# SPDX-License-Identifier: Apache-2.0
"""Admission in one API server: it decides from classes, the engine's load and prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import exp
from pathlib import Path

from msgspec.structs import replace

from scheduler_plugins.admission.board import Board
from scheduler_plugins.admission.control import ADMITTED, AdmissionControl, Decision
from scheduler_plugins.admission.load import ClassLoad, LoadReport
from scheduler_plugins.admission.metrics import AdmissionMetrics
from scheduler_plugins.admission.post import Posted
from scheduler_plugins.admission.prompt import Prompt, PromptMemory
from scheduler_plugins.admission.report import EngineReport, loads
from scheduler_plugins.order.registry import create
from scheduler_plugins.qos.classes import Slo, default_class
from scheduler_plugins.qos.file import SchedulerFile, WatchedFile
from scheduler_plugins.qos.rules import class_of
from scheduler_plugins.queue.work import WINDOW_S, WorkHistogram, bucket_of

RECENT_S = 3.0
"""Time over which admitted work is averaged."""
TRANSIT_S = 0.05
"""Longest time that a request takes from here into the engine's queue, if the engine is not in a step."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ticket:
    """One request, with the predictions for it."""

    number: int
    rank: int
    """Data-parallel rank to which the request probably goes: an index of the gate's boards."""
    qos: str
    arrived_s: float
    prompt: Prompt
    tokens: int
    cached: int
    decision: Decision


class AdmittedWork:
    """The amount of prefill that this API server admitted recently.

    Prefill chunks run in decode steps, and lengthen them. The report's rates are averages over 30 s, which is too slow
    for a sudden change. So they are used only for the work that other API servers admitted.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque()
        self._all = WorkHistogram()

    def add(self, now_s: float, cost_s: float) -> None:
        """Note an admitted request with `cost_s` seconds of prefill."""
        self._recent.append((now_s, cost_s))
        self._all.arrive(0, cost_s, now_s)

    def share(self, now_s: float, engine_share: float) -> float:
        """Seconds of prefill per second: our recent work, and the work of other API servers.

        Args:
            engine_share: seconds of prefill that came to the engine per second, from its report.
        """
        while self._recent and self._recent[0][0] < now_s - RECENT_S:
            self._recent.popleft()
        others = max(0.0, engine_share - sum(self._all.arriving(now_s)))
        if not self._recent:
            return others
        over_s = max(RECENT_S / 3, now_s - self._recent[0][0])
        return others + sum(cost_s for _, cost_s in self._recent) / over_s


class AdmissionGate:
    """Decides on requests, and learns from the answers of admitted requests.

    Each API server has its own gate. The gate sees requests of other API servers only in the engine's report.
    """

    def __init__(
        self,
        boards: Sequence[Board],
        metrics: AdmissionMetrics,
        *,
        settings: Path | None,
        cache_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the settings.

        Args:
            boards: the boards of the engine cores, one per data-parallel rank; none: admit everything.
            settings: the YAML file; None: one class, without an SLO.
            cache_tokens: total size of the prefix caches of all ranks; 0: there is none.
            clock: gives seconds, by the clock of the posts.

        Raises:
            QosError: the settings are invalid.
        """
        self._boards = list(boards)
        self._metrics = metrics
        self._watched = WatchedFile(settings) if settings else None
        self.now_s = clock
        self._numbers = count()
        self._unreported: dict[int, tuple[Ticket, float]] = {}
        self._admitted_work = [AdmittedWork() for _ in self._boards]
        self.memory = PromptMemory(cache_tokens)
        self._use(self._watched.current if self._watched else SchedulerFile())

    def class_of(self, headers: Mapping[str, str]) -> str:
        """The class of a request with these headers (names in lower case)."""
        self._reload()
        return class_of(self._rules, headers) or self._default

    def known_class(self, name: str) -> str:
        """The class of this name, otherwise the default class."""
        self._reload()
        return name if name in self._slos else self._default

    @property
    def on(self) -> bool:
        """Whether any class has a promise. If not, `ask` need not be called."""
        return any(slo != Slo() for slo in self._slos.values())

    def promised(self, qos: str) -> Slo:
        """The promise to the class."""
        return self._slos[qos]

    def ask(self, qos: str, prompt: Prompt, rank: int | None = None) -> Ticket:
        """Decide on a request, and count it. Call `done` for each that is admitted.

        Args:
            rank: index of the board of the rank that the client chose; None: vLLM's balancer chooses.
        """
        tokens = self.memory.tokens(prompt)
        cached = self.memory.cached(prompt, tokens)
        rank, report = self._least_loaded(rank)
        decision, cost_s = self._decide(report, qos, tokens, cached)
        ticket = Ticket(
            number=next(self._numbers),
            rank=rank,
            qos=qos,
            arrived_s=self.now_s(),
            prompt=prompt,
            tokens=tokens,
            cached=cached,
            decision=decision,
        )
        if decision.admit:
            self._metrics.admitted.labels(qos).inc()
            self._unreported[ticket.number] = ticket, cost_s
            if self._admitted_work:
                self._admitted_work[rank].add(ticket.arrived_s, cost_s)
        else:
            self._metrics.rejected.labels(qos, decision.cause).inc()
        return ticket

    def first_token(self, ticket: Ticket, ttft_s: float) -> None:
        """Note that the request has its first token, `ttft_s` after its arrival."""
        self.memory.prefilled(ticket.prompt)
        prediction = ticket.decision.prediction
        if prediction is not None:
            self._metrics.predicted_ttft_s.labels(ticket.qos).observe(prediction.ttft_s)
            self._metrics.ttft_s.labels(ticket.qos).observe(ttft_s)
            self._control.first_token(ticket.qos, prediction, ttft_s)

    def last_token(self, ticket: Ticket, tpot_s: float) -> None:
        """Note that the request has its last token. `tpot_s` is its mean time per token after the first."""
        if ticket.decision.prediction is not None:
            self._control.last_token(ticket.qos, ticket.decision.prediction, tpot_s)

    def done(self, ticket: Ticket) -> None:
        """Note that the engine has begun to answer the request, or will never see it."""
        self._unreported.pop(ticket.number, None)

    def show(self) -> None:
        """Copy the engine's own figures into the metrics."""
        posts = [posted for board in self._boards if (posted := board.posted()) is not None]
        if posts:
            self._metrics.show(posts)

    def report(self) -> EngineReport:
        """The report for a router: the load of every rank that posts."""
        posts = [(rank, board.posted()) for rank, board in enumerate(self._boards)]
        return EngineReport(
            ranks=loads((rank, post.report) for rank, post in posts if post is not None)
        )

    def _least_loaded(self, rank: int | None) -> tuple[int, LoadReport | None]:
        """The rank to which a request goes, and the rank's present load; None if no load is known.

        If the client did not choose a rank, it is the rank with the fewest requests, like vLLM's balancer.
        """
        chosen = range(len(self._boards)) if rank is None else (rank,)
        reports = [
            (n, self._as_of_now(posted, n))
            for n in chosen
            if 0 <= n < len(self._boards) and (posted := self._boards[n].posted()) is not None
        ]
        return min(reports, key=lambda load: load[1].requests, default=(0, None))

    def _decide(
        self, report: LoadReport | None, qos: str, tokens: int, cached: int
    ) -> tuple[Decision, float]:
        """The decision, and the request's seconds of prefill (0 if unknown)."""
        cost_s = report.model.prefill_s(tokens, cached) if report else 0.0
        if self.promised(qos) == Slo():
            return ADMITTED, cost_s
        # For a moment, the engine may have other classes than this process.
        if report is None or qos not in report.classes:
            self._metrics.unseen.labels(qos).inc()
            return ADMITTED, cost_s
        return self._control.decide(report, qos, tokens, cached), cost_s

    def _as_of_now(self, posted: Posted, rank: int) -> LoadReport:
        """The report plus the work admitted since. Otherwise all requests of a burst would see the same report."""
        report, now_s = posted.report, self.now_s()
        known_s = posted.written_s - TRANSIT_S
        self._unreported = {
            number: entry
            for number, entry in self._unreported.items()
            if entry[0].arrived_s > known_s or entry[0].rank != rank
        }
        age_s = max(0.0, now_s - posted.written_s)
        faded = exp(-age_s / WINDOW_S)
        classes = {
            name: replace(load, arriving=tuple(faded * work_s for work_s in load.arriving))
            for name, load in report.classes.items()
        }
        for ticket, cost_s in self._unreported.values():
            load = classes.get(ticket.qos)
            if load is not None and ticket.rank == rank:
                classes[ticket.qos] = _with(load, ticket, cost_s)
        all_s = sum(sum(load.arriving) for load in classes.values())
        return replace(
            report,
            classes=classes,
            prefill_left_s=max(0.0, report.prefill_left_s - age_s),
            prefill_share=self._admitted_work[rank].share(now_s, 0.0 if posted.idle else all_s),
        )

    def _reload(self) -> None:
        changed = self._watched.poll(self.now_s()) if self._watched else None
        if changed is not None:
            self._use(changed)

    def _use(self, settings: SchedulerFile) -> None:
        section = settings.scheduler
        by_cost = create(section.policy, section.lambda_).by_cost
        self._control = AdmissionControl(section.qos_classes, by_cost=by_cost)
        self._default = default_class(section.qos_classes).name
        self._slos = {qos_class.name: qos_class.slo for qos_class in section.qos_classes}
        self._rules = settings.request_router.routes


def _with(load: ClassLoad, ticket: Ticket, cost_s: float) -> ClassLoad:
    """The load with one more waiting request."""
    work_s = list(load.work_s)
    work_s[bucket_of(cost_s)] += cost_s
    return replace(
        load,
        waiting=load.waiting + 1,
        tokens=load.tokens + ticket.tokens,
        work_s=tuple(work_s),
    )
