# SPDX-License-Identifier: Apache-2.0
"""Policies by the names that `--policy` uses.

Another installed package adds one by an entry point of the group `scheduler_plugins.policies`: its
name is the policy's, its object a subclass of `Policy` that is made without arguments, or of
`Rule`, which then chooses on both sides unless a rule for decode is named.
"""

from __future__ import annotations

from collections.abc import Callable

from pd_connector.errors import ConfigError
from pd_connector.extensions import load_entry_points, unknown_name
from scheduler_plugins.router.policies.base import Policy
from scheduler_plugins.router.policies.cache_aware import CacheAware
from scheduler_plugins.router.policies.conductor import Conductor
from scheduler_plugins.router.policies.jsq import ShortestQueue
from scheduler_plugins.router.policies.kv_cost import KvCostDecode, KvCostPrefill
from scheduler_plugins.router.policies.least_tpot import LeastTpot
from scheduler_plugins.router.policies.least_work import LeastWork
from scheduler_plugins.router.policies.length import Length
from scheduler_plugins.router.policies.on_demand import OnDemand
from scheduler_plugins.router.policies.power_of_two import PowerOfTwo
from scheduler_plugins.router.policies.prefix_hash import PrefixHash
from scheduler_plugins.router.policies.random_choice import RandomChoice
from scheduler_plugins.router.policies.round_robin import RoundRobin
from scheduler_plugins.router.policies.session import Session
from scheduler_plugins.router.policies.sides import Rule, Sides

PREFILL: dict[str, Callable[[], Rule]] = {
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "jsq": ShortestQueue,
    "least_work": LeastWork,
    "prefix_hash": PrefixHash,
    "session": Session,
    "cache_aware": CacheAware,
    "kv_cost": KvCostPrefill,
    "conductor": Conductor,
    "conductor_2x": Conductor.twice,
    "least_delay": Conductor.least_delay,
    "on_demand": OnDemand,
}
"""This package's rules for the prefill side: the names of `--policy`."""
DECODE: dict[str, Callable[[], Rule]] = {
    "least_tpot": LeastTpot,
    "power_of_two": PowerOfTwo,
    "kv_cost": KvCostDecode,
    "jsq": ShortestQueue,
    "round_robin": RoundRobin,
    "random": RandomChoice,
}
"""This package's rules for the decode side: the names of `--decode-policy`."""
WRAPPER = "length"
GROUP = "scheduler_plugins.policies"
"""Entry points of other packages' policies. Those of the queue are in the same group
(`scheduler_plugins/order/registry.py`)."""


def create(name: str, decode: str = "") -> Policy:
    """A new policy object. This package's own names come before those of other packages.

    Args:
        name: option `--policy`. `length:NAME` wraps the policy NAME; `length` alone wraps
            `conductor`.
        decode: option `--decode-policy`; empty: the rule that goes with `name`.

    Raises:
        ConfigError: no policy has that name, or another package's cannot be loaded.
    """
    if name == WRAPPER or name.startswith(WRAPPER + ":"):
        return Length(create(name.partition(":")[2] or "conductor", decode))
    if decode and decode not in DECODE:
        raise unknown_name("decode policy", decode, DECODE, GROUP, "decode_policy")
    if name in PREFILL:
        rule = PREFILL[name]()
        return Sides(rule, DECODE[decode or rule.decode]())
    return _added(name, decode)


def _added(name: str, decode: str) -> Policy:
    """Another package's policy."""
    extension = load_entry_points(GROUP).get(name)
    if extension is None:
        raise unknown_name("policy", name, [*PREFILL, WRAPPER], GROUP, "policy")
    found = extension.load()
    if isinstance(found, type) and issubclass(found, Rule):
        return Sides(found(), DECODE[decode]() if decode else found())
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(
            f"policy {name!r}, which {extension.source} adds, is {found!r}: must be a subclass of "
            "scheduler_plugins.router.policies.base.Policy"
        )
    return found()
