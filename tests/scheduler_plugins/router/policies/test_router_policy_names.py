# SPDX-License-Identifier: Apache-2.0
"""The router's policies by name, and those that other packages add (docs/extending.md has one)."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.distributions import add_distribution

from scheduler_plugins.router.policies.registry import DECODE, GROUP, PREFILL, create
from scheduler_plugins.router.policies.sides import Sides
from scheduler_plugins.router.settings.config import RouterConfig

MODULE = """
from scheduler_plugins.router.policies.base import Defer, Policy, Reject, Role, Route
from scheduler_plugins.router.policies.sides import Choice, Rule

class First(Policy):
    def decide(self, request, view, now_s, random):
        return Route(None, view.engines(Role.DECODE)[0].name)

class Last(Rule):
    def choose(self, request, engines, view, now_s, random):
        return Choice(engines[-1])

class Nowhere(Policy):
    def decide(self, request, view, now_s, random):
        return Route("elsewhere", view.engines(Role.DECODE)[0].name)

class Nothing(Policy):
    def decide(self, request, view, now_s, random):
        pass

class Breaks(Policy):
    def decide(self, request, view, now_s, random):
        raise RuntimeError("a bug")

class Unmade(Policy):
    def __init__(self, size):
        self.size = size
    decide = None

class Vague(Policy):
    def decide(self, request, view, now_s, random):
        return Reject("full", float("nan"))

class Nameless(Policy):
    def decide(self, request, view, now_s, random):
        return Reject(None, 1.0)

class Never(Policy):
    def decide(self, request, view, now_s, random):
        return Defer(float("inf"))

seven = 7
"""
POINTS = {
    "first": "toy:First",
    "last": "toy:Last",
    "nowhere": "toy:Nowhere",
    "nothing": "toy:Nothing",
    "breaks": "toy:Breaks",
    "unmade": "toy:Unmade",
    "vague": "toy:Vague",
    "nameless": "toy:Nameless",
    "never": "toy:Never",
    "seven": "toy:seven",
    "round_robin": "toy:First",
}
PROGRAM = """
import random, sys, types
sys.path.insert(0, sys.argv[1])
from pd_connector.errors import PDConnectorError
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.policies.base import Request, Role
from scheduler_plugins.router.policies.registry import create
from scheduler_plugins.router.routing.view import LiveView
prefill, decode = (
    [types.SimpleNamespace(name=f"{kind}{n}", role=role, open_requests=0) for n in range(2)]
    for kind, role in (("p", Role.PREFILL), ("d", Role.DECODE))
)
view = LiveView({Role.PREFILL: prefill, Role.DECODE: decode}, Prefixes(), 0.0)
for names in sys.argv[2:]:
    try:
        policy = create(*names.split("+"))
        print(*policy.decide(Request("1", tokens=9), view, 0.0, random.Random(0))[:2])
    except PDConnectorError as error:
        print(error)
"""


def decided(folder: Path, *names: str) -> list[str]:
    """What policies decide, made by `--policy`, or by `--policy` + `--decode-policy`."""
    add_distribution(folder, "toy", {"toy": MODULE}, {GROUP: POINTS})
    command = [sys.executable, "-c", PROGRAM, str(folder), *names]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


def test_our_own_are_made_by_name() -> None:
    assert isinstance(create("round_robin"), Sides)
    assert all(create(name) for name in [*PREFILL, "length", "length:jsq"])
    assert all(create("conductor", name) for name in DECODE)


def test_a_config_with_a_name_that_nobody_has_is_refused_at_start() -> None:
    engines = {"prefill": ("http://a",), "decode": ("http://b",)}
    with pytest.raises(
        ValueError,
        match="policy 'robin' is not known: did you mean 'round_robin'",
    ):
        RouterConfig(**engines, policy="robin")
    with pytest.raises(ValueError, match="decode policy 'best' is not known: there are least_tpot"):
        RouterConfig(**engines, decode_policy="best")


def test_another_packages_policy_is_found_and_ours_stay_ours(tmp_path: Path) -> None:
    found, ours, wrong = decided(tmp_path, "first", "round_robin+round_robin", "seven")
    assert (found, ours) == ("None d0", "p0 d0")
    assert "package 'toy'" in wrong
    assert "must be a subclass of scheduler_plugins.router.policies.base.Policy" in wrong


def test_another_packages_rule_chooses_on_the_side_that_it_is_named_for(tmp_path: Path) -> None:
    names = ("last", "last+round_robin", "round_robin+last", "first+last")
    *found, both, no_rule = decided(tmp_path, *names, "round_robin+first")
    assert found == ["p1 d1", "p1 d0", "p0 d1"]
    assert "chooses on both sides: leave decode_policy out" in both
    assert "must be a subclass of scheduler_plugins.router.policies.sides.Rule" in no_rule


def test_a_policy_that_fails_or_cannot_be_followed_names_its_package(tmp_path: Path) -> None:
    problems = {
        "nowhere": "p must be None or one of p0, p1",
        "nothing": "must be a Route, Reject or Defer",
        "breaks": "failed: RuntimeError('a bug')",
        "unmade": "cannot be made without arguments: TypeError",
        "vague": "retry_after_s must be a number of seconds from 0 to inf",
        "nameless": "cause must be a word",
        "never": "until_s must be a number of seconds from",
    }
    told = decided(tmp_path, *problems)
    for (name, problem), line in zip(problems.items(), told, strict=True):
        assert f"{name!r}, which package 'toy'" in line
        assert problem in line
