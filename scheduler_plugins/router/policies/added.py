# SPDX-License-Identifier: Apache-2.0
"""Policies that other packages add by entry points. The router checks their decisions."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable
from math import inf
from random import Random

from pd_connector.errors import ConfigError, PDConnectorError
from pd_connector.extensions import Extension, load_entry_points
from scheduler_plugins.router.policies.base import (
    Decision,
    Defer,
    Policy,
    Reject,
    Request,
    Role,
    Route,
    View,
)
from scheduler_plugins.router.policies.sides import Rule, Sides

GROUP = "scheduler_plugins.policies"
"""Entry points of other packages' policies. Policies of the queue use the same group
(`scheduler_plugins/order/registry.py`)."""


_SHOWN = reprlib.Repr()
"""How a decision of another package is shown: it may be large, and its `__repr__` may raise."""
_SHOWN.maxother = _SHOWN.maxstring = 200
_LONGEST_CAUSE = 64


class PolicyError(PDConnectorError):
    """A policy failed (`__cause__` is what it raised), or made a decision that cannot be followed."""


def added_policy(name: str, decode: Callable[[], Rule] | None) -> Policy | None:
    """Another package's policy of this name; None if there is none.

    Args:
        decode: makes the rule named for decode; None: none is named.

    Raises:
        ConfigError: the policy cannot be loaded, is not a policy, or chooses both sides although a
            rule for decode is named.
    """
    extension = load_entry_points(GROUP).get(name)
    if extension is None:
        return None
    loaded = extension.load()
    if _is(loaded, Rule):
        rule: Callable[[], Rule] = extension.make
        return Checked(Sides(rule(), (decode or rule)()), extension)
    if not _is(loaded, Policy):
        raise _wrong(extension, "policy", loaded, "base.Policy or sides.Rule")
    if decode:
        raise ConfigError(
            f"policy {name!r}, which {extension.source} adds, chooses on both sides: leave "
            "decode_policy out"
        )
    return Checked(extension.make(), extension)


def added_rule(name: str) -> tuple[Callable[[], Rule], Extension] | None:
    """Another package's rule for the decode side, and its origin; None if nothing has this name.

    Raises:
        ConfigError: the rule cannot be loaded, or is not a rule.
    """
    extension = load_entry_points(GROUP).get(name)
    if extension is None:
        return None
    loaded = extension.load()
    if not _is(loaded, Rule):
        raise _wrong(extension, "decode policy", loaded, "sides.Rule")
    return extension.make, extension


def added_names() -> list[str]:
    """Names of other packages' router policies and rules. Loads them.

    Raises ConfigError if one cannot be loaded.
    """
    added = load_entry_points(GROUP).items()
    return [name for name, point in added if _is(point.load(), (Policy, Rule))]


class Checked(Policy):
    """Raises PolicyError, which names the package, if a policy fails or the router cannot follow its decision."""

    def __init__(self, policy: Policy, extension: Extension) -> None:
        self.policy = policy
        self._extension = extension

    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Decision:
        whose = f"policy {self._extension.name!r}, which {self._extension.source} adds,"
        try:
            decision = self.policy.decide(request, view, now_s, random)
            problem = _problem(decision, view)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # another package's code can raise SystemExit, too
            raise PolicyError(f"{whose} failed: {_SHOWN.repr(error)}") from error
        if problem:
            raise PolicyError(f"{whose} decided {_SHOWN.repr(decision)}: {problem}")
        return decision


def _problem(decision: object, view: View) -> str:
    """What is wrong with a decision; empty if nothing is."""
    if isinstance(decision, Reject):
        cause: object = decision.cause
        if not (isinstance(cause, str) and cause.isidentifier() and len(cause) <= _LONGEST_CAUSE):
            return "cause must be a word, the metric's label"
        return _wrong_time("retry_after_s", decision.retry_after_s, 0.0, inf)
    if isinstance(decision, Defer):
        return _wrong_time("until_s", decision.until_s, -sys.float_info.max, sys.float_info.max)
    if not isinstance(decision, Route):
        return "must be a Route, Reject or Defer (scheduler_plugins/router/policies/base.py)"
    prefill, slow = (
        [engine.name for engine in view.engines(role)] for role in (Role.PREFILL, Role.CPU_PREFILL)
    )
    decode = [engine.name for engine in view.engines(Role.DECODE)]
    if decision.d not in decode:
        return f"d must be one of {', '.join(decode)}"
    able = prefill + slow
    if decision.p is not None and decision.p not in able:
        return f"p must be None or one of {', '.join(able) or '(none is there)'}"
    sources = prefill + [pool.name for pool in view.pools()]
    if decision.pull_from is not None and decision.pull_from not in sources:
        return f"pull_from must be None or one of {', '.join(sources) or '(none is there)'}"
    return ""


def _wrong_time(name: str, value: object, least: float, most: float) -> str:
    if isinstance(value, int | float) and least <= value <= most:  # NaN is neither
        return ""
    return f"{name} must be a number of seconds from {least:g} to {most:g}"


def _is(loaded: object, base: type | tuple[type, ...]) -> bool:
    return isinstance(loaded, type) and issubclass(loaded, base)


def _wrong(extension: Extension, kind: str, loaded: object, base: str) -> ConfigError:
    return ConfigError(
        f"{kind} {extension.name!r}, which {extension.source} adds, is {loaded!r}: must be a subclass "
        f"of scheduler_plugins.router.policies.{base}"
    )
