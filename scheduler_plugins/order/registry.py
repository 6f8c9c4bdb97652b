# SPDX-License-Identifier: Apache-2.0
"""Policies by the names that configurations use."""

from __future__ import annotations

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.by_arrival import Fcfs, Priority
from scheduler_plugins.order.length_grouped import LengthGrouped
from scheduler_plugins.order.longest_prefix import LongestPrefix
from scheduler_plugins.order.prefill_only import PrefillOnly
from scheduler_plugins.order.srjf import DEFAULT_LAMBDA, Srjf, SrjfCalibrated

POLICIES: dict[str, type[QueuePolicy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "srjf": Srjf,
    "srjf_calibrated": SrjfCalibrated,
    "longest_prefix": LongestPrefix,
    "length_grouped": LengthGrouped,
    "prefill_only": PrefillOnly,
}


def create(name: str, lambda_: float = DEFAULT_LAMBDA) -> QueuePolicy:
    """The policy of that name; those that age requests do so with `lambda_`.

    Raises:
        ValueError: there is no policy of that name, or `lambda_` is negative.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"policy {name!r}: must be one of {', '.join(POLICIES)}")
    if issubclass(policy, SrjfCalibrated):
        return policy(lambda_)
    return policy()
