# SPDX-License-Identifier: Apache-2.0
"""Which requests are audited. vLLM computes the prompt of such a request itself, and compares the result with the
producer's KV of it (config key `audit`).

For vLLM an audited request is an ordinary request. The comparison begins after the step that computes the end of its
prompt, and reads the request's own pages. If the request ends earlier, its pages are kept until the comparison is
over. Until a producer has passed an audit, vLLM computes all of its prompts itself: no answer is wrong, and no request
waits.

The next step overwrites the state at a prompt's end. So states are compared at the prompt's last page boundary, where
both engines keep a state (`StateTables.boundary`), and its page is held until then. If one of the engines keeps none
there, the next audit compares KV alone. That is enough, because a layer's KV depends on the states of the layers below
it.
"""

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_connector.agent.commands import Command, Distrust, Drop
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.geometry import pages_for
from pd_connector.vllm.handoff.fetch import Fetch, Pair
from pd_connector.vllm.handoff.streaming import kept_pages, scheduled
from pd_connector.vllm.messages import AuditReport
from pd_connector.vllm.pages.held_states import HeldStates
from pd_connector.vllm.pages.state_tables import StateTables
from pd_connector.vllm.pages.windows import Windows

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("pd_connector.vllm")

LEAST_TOKENS = 32
"""Fewest tokens to fetch for an audit. A shorter prompt would show little."""
_MOST_PAIRS = 4096


@dataclass(slots=True)
class _Audit:
    """One request that is audited."""

    fetch: Fetch
    unchanged: Callable[[], bool]  # whether its adapter is the same as when the request came
    pages: list[list[int]] = field(default_factory=list)  # by table, as vLLM allocates them
    computed: int = 0  # tokens, before the step that was scheduled last
    scheduled: int = 0  # tokens, after that step
    listed: tuple[int, ...] = ()  # first compared page of each table; empty before the comparison
    keep_until: float | None = None  # the request has ended, and its pages are kept
    reports: int = 0  # ranks whose comparison is over
    more: bool = False  # a rank has passed, and can fetch by another path that has not
    state_token: int = 0  # where states are compared; 0: none are

    @property
    def last(self) -> int:
        """The comparison begins when at least this number of tokens is computed: all tokens to compare, and one
        more."""
        return self.fetch.tokens + 1


class Audits:
    """Used by the scheduler's thread only.

    Args:
        windows: page sizes and windows of the engine's page tables.
        states: the page tables that list states.
        ranks: number of ranks; each compares the KV that it holds.
    """

    def __init__(self, config: Config, windows: Windows, states: StateTables, ranks: int) -> None:
        self._off = config.audit == "off"
        self._share = config.audit_share
        self._keep_s = config.stall_timeout_s
        # Only a new session tells whether a producer that failed an audit has restarted.
        self._retry_s = config.session_timeout_s
        self._windows = windows
        self._states = states
        self._held = HeldStates(states)
        self._ranks = ranks
        self._passed: dict[Pair, None] = {}
        self._retry: dict[Pair, float] = {}
        self._kv_only: dict[Pair, None] = {}  # states are kept nowhere in common
        self._short: dict[Pair, None] = {}  # the log says that all prompts were too short so far
        self._chosen: dict[str, bool] = {}  # by id of a later request: whether it is audited
        self._audits: dict[str, _Audit] = {}
        self._over: list[str] = []  # requests that have ended; their pages may be freed now

    def bind(self, manager: "KVCacheManager") -> None:
        """Attach vLLM's pages, before the first request."""
        self._held.bind(manager)

    def __contains__(self, request_id: str) -> bool:
        """Whether this request is computed here to compare it."""
        return request_id in self._audits

    @property
    def pending(self) -> bool:
        """Whether pages are kept for a comparison, so that steps are needed even without a request."""
        kept = any(audit.keep_until is not None for audit in self._audits.values())
        return kept or bool(self._over)

    def computes(self, request: "Request", fetch: Fetch, missing: int) -> bool:
        """Whether vLLM computes this prompt itself although its KV can be fetched.

        Args:
            missing: number of tokens that a fetch would bring.
        """
        request_id = request.request_id
        if self._off:
            return False
        if fetch.pair not in self._passed:
            return True
        if request_id not in self._chosen:
            self._chosen[request_id] = self._share > 0 and random.random() < self._share
        return self._chosen[request_id] and self._eligible(request, fetch, missing)

    def wants(self, request: "Request", fetch: Fetch, missing: int) -> bool:
        """Whether this request would be audited if vLLM gave it pages now. `missing`: see `computes`."""
        return self.computes(request, fetch, missing) and self._eligible(request, fetch, missing)

    def begin(self, request: "Request", fetch: Fetch, unchanged: Callable[[], bool]) -> bool:
        """Begin an audit of a prompt for which vLLM has allocated pages. Returns False if this prompt is not audited.

        Args:
            unchanged: called after the prompt was computed; returns whether the adapter still has the content of the
                fetch.
        """
        if not self.wants(request, fetch, fetch.tokens - fetch.computed_tokens):
            return False
        position = 0 if fetch.pair in self._kv_only else self._position(request, fetch)
        self._audits[request.request_id] = _Audit(fetch, unchanged, state_token=position)
        return True

    def step(self, output: "SchedulerOutput") -> tuple[list[Command], list[str]]:
        """Update all audits after vLLM has scheduled a step.

        Returns:
            Commands for the agents, and requests that have ended whose pages may be freed.
        """
        commands: list[Command] = []
        if not self._audits and not self._over:
            return [], []
        for request_id in output.preempted_req_ids or ():
            commands += self._drop(request_id, Cause.ABORTED)
        for request_id, computed in scheduled(output, self._audits):
            audit = self._audits[request_id]
            audit.computed = computed
            lost = zip(audit.listed, self._windows.first_kept(computed), strict=False)
            after = computed + output.num_scheduled_tokens.get(request_id, 0)
            held = self._hold(request_id, audit, after)
            if not held:
                why = f"vLLM keeps no state after {audit.state_token} tokens here"
                self._compare_kv_only(audit.fetch.pair, why)
            if not held or any(first < kept for first, kept in lost):
                commands += self._drop(request_id, Cause.WINDOW)
        now = time.monotonic()
        for request_id, audit in list(self._audits.items()):
            if audit.keep_until is not None and audit.keep_until <= now:
                commands += self._drop(request_id, Cause.STALLED)
            elif not audit.listed and audit.scheduled >= audit.last:
                if audit.unchanged():
                    commands.append(self._load(request_id, audit))  # computed with the step before
                else:
                    commands += self._drop(request_id, Cause.MODEL)
            tokens = output.num_scheduled_tokens.get(request_id, 0)
            audit.scheduled = max(audit.scheduled, audit.computed + tokens if tokens else 0)
        over, self._over = self._over, []
        return commands, over

    def finished(
        self, request_id: str, computed: int, *, complete: bool
    ) -> tuple[bool, list[Command]]:
        """A request has ended.

        Args:
            computed: number of its computed tokens.
            complete: whether it was not aborted.

        Returns:
            Whether the request's pages must be kept until `step` returns its id, and commands for the agents.
        """
        self._chosen.pop(request_id, None)
        audit = self._audits.get(request_id)
        if audit is None:
            return False, []
        audit.computed = max(audit.computed, computed)
        lost = zip(audit.listed, self._windows.first_kept(audit.computed), strict=False)
        whole = complete and audit.scheduled >= audit.last
        if not whole or any(first < kept for first, kept in lost):
            return False, self._drop(request_id, Cause.ABORTED)
        audit.keep_until = time.monotonic() + self._keep_s
        return True, []

    def reported(self, reports: Iterable[AuditReport]) -> list[Command]:
        """Ranks have ended comparisons. Returns commands for all ranks."""
        commands: list[Command] = []
        for report in reports:
            audit = self._audits.get(report.request)
            if audit is None:
                continue
            audit.reports += 1
            pair = audit.fetch.pair
            audit.more |= report.cause is Cause.UNAUDITED
            if report.cause in (None, Cause.UNAUDITED):
                if audit.reports >= self._ranks:
                    self._end(report.request)
                    if not audit.more:
                        self._pass(pair)
                continue
            if report.cause is Cause.AUDIT:
                self._passed.pop(pair, None)
                self._retry[pair] = time.monotonic() + self._retry_s
                adapter = audit.fetch.adapter
                commands += [Distrust(engine, report.detail, adapter) for engine in report.engines]
            if report.cause is Cause.TOKENS and audit.state_token:
                self._compare_kv_only(pair, report.detail)
            commands += self._drop(report.request, Cause.ABORTED)
        return commands

    def weights_changed(self) -> list[Command]:
        """This engine's weights have changed: KV of its running prompts is of the old weights, or of both."""
        return [
            command
            for request_id in list(self._audits)
            for command in self._drop(request_id, Cause.ABORTED)
        ]

    def refused(self, pair: Pair) -> None:
        """A rank no longer trusts this producer, for example because it has restarted."""
        for pairs in (self._passed, self._kv_only, self._short):
            pairs.pop(pair, None)

    def _compare_kv_only(self, pair: Pair, why: str) -> None:
        """Compare only KV in this producer's next audit, because one of the engines does not keep the states to
        compare. Otherwise no audit of this producer might ever end."""
        if pair not in self._kv_only:
            engine = pair[0][0].engine_id
            logger.info("audits of engine %s compare its KV without its states: %s", engine, why)
        self._kv_only[pair] = None

    def _position(self, request: "Request", fetch: Fetch) -> int:
        """The position at which both engines keep the states of a prompt; 0: none. The producer's prompt is shorter by
        the tokens that it leaves to its consumer. It also offers the states at its prompt's end."""
        position, end = self._states.boundary(request.num_prompt_tokens), fetch.tokens
        return position if position in (end, self._states.boundary(end)) else 0

    def _eligible(self, request: "Request", fetch: Fetch, missing: int) -> bool:
        """Whether an audit of this producer can begin with a request of `missing` missing tokens."""
        pair = fetch.pair
        if self._states and self._states.keeps_boundaries and pair not in self._kv_only:
            position = self._position(request, fetch)
            if not 0 < position <= fetch.tokens:
                self._say_short(pair)
                return False  # no state to compare
        under_way = any(audit.fetch.pair == pair for audit in self._audits.values())
        early = time.monotonic() < self._retry.get(pair, 0.0)
        return missing >= LEAST_TOKENS and not under_way and not early

    def _say_short(self, pair: Pair) -> None:
        """Log, once for each producer, how long a prompt must be for its audit."""
        if pair in self._passed or pair in self._short:
            return
        self._short[pair] = None
        while len(self._short) > _MOST_PAIRS:
            del self._short[next(iter(self._short))]
        logger.info(
            "prompts for engine %s are computed here until one of at least %d tokens has been compared with it: vLLM keeps "
            "states only after whole pages, and a shorter prompt has none (config key audit)",
            pair[0][0].engine_id,
            max(LEAST_TOKENS + 1, self._states.shortest_with_boundary),
        )

    def _hold(self, request_id: str, audit: _Audit, computed: int) -> bool:
        """Take a reference to the pages of the states to compare, once a step computes them. Returns whether they exist.

        Args:
            computed: tokens of the request that this step will have computed.
        """
        if not audit.state_token or computed < audit.state_token:
            return True
        return self._held.hold(request_id, audit.state_token)

    def _load(self, request_id: str, audit: _Audit) -> Command:
        """Begin to compare. Only the later half of a window is compared: vLLM goes on to free the earlier half."""
        stop = audit.fetch.tokens
        kept = self._windows.first_kept(max(audit.computed, audit.last))
        listed, tables = [], []
        for pages, first, (page_size, window) in zip(
            audit.pages, kept, self._windows.tables, strict=True
        ):
            count = pages_for(stop, page_size)
            begin = min(first + (count - first) // 2, count - 1) if window else 0
            listed.append(begin)
            tables.append([0] * begin + pages[begin:count])
        audit.listed = tuple(listed)
        if held := self._held.pages(request_id):
            tables = [page or table for page, table in zip(held, tables, strict=True)]
        return audit.fetch.load(
            request_id, stop, kept_pages(tables), compares=True, state_token=audit.state_token
        )

    def _drop(self, request_id: str, cause: Cause) -> list[Command]:
        """This request's audit cannot end; another request will be audited."""
        if request_id not in self._audits:
            return []
        self._end(request_id)
        return [Drop(request_id, cause)]

    def _end(self, request_id: str) -> None:
        self._held.release(request_id)
        if self._audits.pop(request_id).keep_until is not None:
            self._over.append(request_id)

    def _pass(self, pair: Pair) -> None:
        self._retry.pop(pair, None)
        self._passed[pair] = None
        for pairs in (self._passed, self._retry, self._kv_only):
            while len(pairs) > _MOST_PAIRS:
                del pairs[next(iter(pairs))]
