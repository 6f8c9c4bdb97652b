# SPDX-License-Identifier: Apache-2.0
"""The live router's policy. If the named policy fails, or its decision cannot be followed, the default policy decides
instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random

from pd_connector.extensions import Faults
from scheduler_plugins.router.limit import SLOW_S, LateError, Limited
from scheduler_plugins.router.policies.added import PolicyError
from scheduler_plugins.router.policies.base import Decision, Policy, Request, View
from scheduler_plugins.router.policies.registry import DEFAULT, create, is_added

logger = logging.getLogger(__name__)


class Fallback(Policy):
    """The policy that the user names, and the default policy for what it cannot decide."""

    def __init__(
        self, name: str, decode: str, count: Callable[[str], object] = lambda cause: None
    ) -> None:
        """Make both policies.

        Args:
            name, decode: `--policy` and `--decode-policy`, as for `registry.create`.
            count: gets the cause of each decision that the default policy makes instead: `raised`, `wrong`, `late`,
                `paused`, `deferred`.

        Raises:
            ConfigError: as `registry.create`.
        """
        self._policy, self._instead = create(name, decode), create(DEFAULT)
        self._limited = Limited() if is_added(name, decode) else None
        shown = f"{name} with decode policy {decode}" if decode else name
        self._title = f"route policy {shown}"
        self._count = count
        self._faults = Faults(
            logger,
            f"{DEFAULT} decides instead. Repair the policy, or name another one (--policy, --decode-policy)",
        )

    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Decision:
        limited = self._limited
        try:
            if limited is None:
                return self._policy.decide(request, view, now_s, random)
            if not limited.is_paused(now_s):
                decision = limited.call(
                    lambda: self._policy.decide(request, view, now_s, random), now_s
                )
                if limited.took_s > SLOW_S:
                    self._note("slow", slow_text(limited.took_s), now_s)
                return decision
            cause = "paused"  # its fault was logged when the pause began
        except (Exception, LateError) as error:
            cause = cause_of(error)
            self._note(cause, f"failed: {text_of(error)}", now_s, raised_by(error))
        self._count(cause)
        return self._instead.decide(request, view, now_s, random)

    def decide_at_last(
        self, request: Request, view: View, now_s: float, random: Random, waited_s: float
    ) -> Decision:
        """The default policy's decision, because the policy has deferred this request for too long."""
        self._note("deferred", f"deferred a request for {waited_s:.0f} s", now_s)
        self._count("deferred")
        return self._instead.decide(request, view, now_s, random)

    def _note(
        self, kind: str, what: str, now_s: float, raised: BaseException | None = None
    ) -> None:
        self._faults.note(kind, f"{self._title} {what}", now_s, raised)


def cause_of(error: BaseException) -> str:
    """`late`, `wrong` (a decision that cannot be followed) or `raised`: the metric's label."""
    raised = raised_by(error)
    if isinstance(raised, LateError):
        return "late"
    return "wrong" if raised is None else "raised"


def raised_by(error: BaseException) -> BaseException | None:
    """The exception of the policy's code; None: it returned a decision that cannot be followed."""
    return error.__cause__ if isinstance(error, PolicyError) else error


def text_of(error: BaseException) -> str:
    """The error, for the log."""
    return str(error) if isinstance(error, PolicyError) else repr(error)


def slow_text(took_s: float) -> str:
    """Description, for the log, of a decision that took this long."""
    return f"took {took_s:.2f} s for one decision (wanted: less than {SLOW_S:g}), and nothing was served meanwhile"
