# SPDX-License-Identifier: Apache-2.0
"""Policies by the names that `--policy` uses.

Another installed package adds a policy by an entry point of the group `scheduler_plugins.policies`.
The entry point has the policy's name. Its object is a subclass of `Policy` or `Rule` that needs no
arguments. A rule chooses on both sides if it is named as the policy alone. It chooses on one side
if another rule is named for the other side.
"""

from __future__ import annotations

from collections.abc import Callable

from pd_connector.extensions import Extension, unknown_name
from scheduler_plugins.router.policies.added import GROUP, Checked, added_policy, added_rule
from scheduler_plugins.router.policies.affinity_rules import CacheAware, PrefixHash, Session
from scheduler_plugins.router.policies.arrow import Arrow
from scheduler_plugins.router.policies.base import Policy
from scheduler_plugins.router.policies.conductor import Conductor
from scheduler_plugins.router.policies.dop import Dop
from scheduler_plugins.router.policies.kv_cost import KvCostDecode, KvCostPrefill
from scheduler_plugins.router.policies.least_tpot import LeastTpot
from scheduler_plugins.router.policies.length import Length
from scheduler_plugins.router.policies.load_rules import (
    LeastWork,
    PowerOfTwo,
    RandomChoice,
    RoundRobin,
    ShortestQueue,
)
from scheduler_plugins.router.policies.on_demand import OnDemand
from scheduler_plugins.router.policies.sides import Rule, Sides

DEFAULT = "least_delay"
"""The policy if the user names none. docs/simulator.md says why it was chosen."""
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
BOTH_SIDES: dict[str, Callable[[Rule | None], Policy]] = {
    "arrow": Arrow,
    "dop": Dop,
}
"""This package's policies that choose on both sides at once: names of `--policy`, too. They get the decode rule."""
WRAPPER = "length"


def create(name: str, decode: str = "") -> Policy:
    """A new policy object. This package's own names take precedence over names of other packages.

    Args:
        name: option `--policy`. `length:NAME` wraps the policy NAME; `length` alone wraps
            the default.
        decode: option `--decode-policy`; empty: the decode rule that belongs to `name`.

    Raises:
        ConfigError: no policy has that name, or another package's policy cannot be loaded.
    """
    if name == WRAPPER or name.startswith(WRAPPER + ":"):
        return Length(create(name.partition(":")[2] or DEFAULT, decode))
    rule, extension = _decode_rule(decode) if decode else (None, None)
    if name in PREFILL:
        prefill = PREFILL[name]()
        made: Policy = Sides(prefill, (rule or DECODE[prefill.decode])())
    elif name in BOTH_SIDES:
        made = BOTH_SIDES[name](rule() if rule else None)
    else:
        policy = added_policy(name, rule)
        if policy is None:
            raise unknown_name("policy", name, [*PREFILL, *BOTH_SIDES, WRAPPER], GROUP, "policy")
        return policy
    return made if extension is None else Checked(made, extension)


def is_added(name: str, decode: str) -> bool:
    """Whether a policy of these names (see `create`) is another package's code."""
    own = name.removeprefix(WRAPPER + ":")
    return own not in {*PREFILL, *BOTH_SIDES, WRAPPER} or decode not in {"", *DECODE}


def _decode_rule(name: str) -> tuple[Callable[[], Rule], Extension | None]:
    if name in DECODE:
        return DECODE[name], None
    if (added := added_rule(name)) is None:
        raise unknown_name("decode policy", name, DECODE, GROUP, "decode_policy")
    return added
