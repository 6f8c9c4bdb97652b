# SPDX-License-Identifier: Apache-2.0
"""Policies by their names in configurations.

Another installed package adds a policy with an entry point of the group `scheduler_plugins.policies`. The entry point
has the policy's name. Its object is a subclass of `QueuePolicy` whose constructor takes no arguments.
"""

from __future__ import annotations

import logging
import math
import reprlib
import time
from collections.abc import Callable

from pd_connector.errors import ConfigError
from pd_connector.extensions import Extension, Faults, load_entry_points, unknown_name
from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.order.srjf import DEFAULT_LAMBDA, PrefillOnly, Srjf, SrjfCalibrated
from scheduler_plugins.order.without_cost import Fcfs, LengthGrouped, LongestPrefix, Priority

logger = logging.getLogger(__name__)

POLICIES: dict[str, type[QueuePolicy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "srjf": Srjf,
    "srjf_calibrated": SrjfCalibrated,
    "longest_prefix": LongestPrefix,
    "length_grouped": LengthGrouped,
    "prefill_only": PrefillOnly,
}
"""The policies of this package."""
GROUP = "scheduler_plugins.policies"
"""Entry points of other packages' policies."""


def create(name: str, lambda_: float = DEFAULT_LAMBDA) -> QueuePolicy:
    """A new policy object. If a name occurs twice, this package's policy is used.

    Args:
        name: config key `policy`.
        lambda_: seconds per second by which `SrjfCalibrated` and its subclasses age requests.

    Raises:
        ValueError: no policy has that name, another package's policy cannot be loaded, or `lambda_` is negative.
    """
    if name in POLICIES:
        return _made(POLICIES[name], lambda_)
    extension = load_entry_points(GROUP).get(name)
    if extension is None:
        raise unknown_name("policy", name, POLICIES, GROUP, "policy")
    loaded = extension.load()
    if not (isinstance(loaded, type) and issubclass(loaded, QueuePolicy)):
        raise ConfigError(
            f"policy {name!r}, which {extension.source} adds, is {loaded!r}: must be a subclass of "
            "scheduler_plugins.order.base.QueuePolicy"
        )
    return Guarded(_made(loaded, lambda_), extension)


def _made(policy: type[QueuePolicy], lambda_: float) -> QueuePolicy:
    return policy(lambda_) if issubclass(policy, SrjfCalibrated) else policy()


class Guarded(QueuePolicy):
    """Another package's policy. Its faults must not end the engine: they are logged, and the request gets its place by
    arrival."""

    def __init__(self, policy: QueuePolicy, extension: Extension) -> None:
        self._policy = policy
        self._whose = f"queue policy {extension.name!r}, which {extension.source} adds,"
        self._faults = Faults(
            logger,
            "such requests go by their arrival. Repair the policy, or name another one (policy)",
        )
        self.calibrated = policy.calibrated
        self.by_cost = policy.by_cost
        self.overtakes_running = policy.overtakes_running
        self.resumes_first = policy.resumes_first
        self.splits_batches = policy.splits_batches

    def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
        return self._number_of("key", lambda: self._policy.key(request, cached_tokens, cost_s))

    def group(self, request: Waiting) -> int:
        number = self._number_of("group", lambda: self._policy.group(request))
        return int(number) if math.isfinite(number) else 0

    def wants_own_batch(self, request: Waiting) -> bool:
        return bool(
            self._number_of("wants_own_batch", lambda: self._policy.wants_own_batch(request))
        )

    def _number_of(self, method: str, ask: Callable[[], float]) -> float:
        """The policy's number; 0 if it fails or returns no number."""
        try:
            number = float(ask())
            if math.isnan(number):
                raise ValueError("it returned NaN, which has no order")
        except Exception as error:  # another package's policy can raise anything
            what = f"{self._whose} failed in {method}: {reprlib.repr(error)}"
            self._faults.note(method, what, time.monotonic(), error)
            return 0.0
        return number
