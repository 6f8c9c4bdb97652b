# SPDX-License-Identifier: Apache-2.0
"""Policies by their names in configurations.

Another installed package adds a policy with an entry point of the group `scheduler_plugins.policies`. The entry point
has the policy's name. Its object is a subclass of `QueuePolicy` whose constructor takes no arguments.
"""

from __future__ import annotations

from pd_connector.errors import ConfigError
from pd_connector.extensions import load_entry_points, unknown_name
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
    policy = POLICIES.get(name) or _added(name)
    if issubclass(policy, SrjfCalibrated):
        return policy(lambda_)
    return policy()


def _added(name: str) -> type[QueuePolicy]:
    """A policy of another package."""
    extension = load_entry_points(GROUP).get(name)
    if extension is None:
        raise unknown_name("policy", name, POLICIES, GROUP, "policy")
    found = extension.load()
    if not (isinstance(found, type) and issubclass(found, QueuePolicy)):
        raise ConfigError(
            f"policy {name!r}, which {extension.source} adds, is {found!r}: must be a subclass of "
            "scheduler_plugins.order.base.QueuePolicy"
        )
    return found
