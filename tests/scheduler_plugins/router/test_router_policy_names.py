# SPDX-License-Identifier: Apache-2.0
"""The router's policies by name, and those that other packages add (docs/extending.md has one)."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.distributions import add_distribution

from scheduler_plugins.router.config import RouterConfig
from scheduler_plugins.router.policies.registry import DECODE, GROUP, PREFILL, create
from scheduler_plugins.router.policies.sides import Sides

MODULE = """
from scheduler_plugins.router.policies.base import Policy, Role, Route

class First(Policy):
    def decide(self, request, view, now_s, random):
        return Route(None, view.engines(Role.DECODE)[0].name)

seven = 7
"""
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from scheduler_plugins.router.policies.registry import create
for name in sys.argv[2:]:
    try:
        print(type(create(name)).__name__)
    except ValueError as error:
        print(error)
"""


def test_our_own_are_made_by_name() -> None:
    assert isinstance(create("round_robin"), Sides)
    assert all(create(name) for name in [*PREFILL, "length", "length:jsq"])
    assert all(create("conductor", name) for name in DECODE)


def test_a_config_with_a_name_that_nobody_has_is_refused_at_start() -> None:
    engines = {"prefill": ("http://a",), "decode": ("http://b",)}
    with pytest.raises(
        ValueError, match="policy 'robin' is not known: there are random, round_robin"
    ):
        RouterConfig(**engines, policy="robin")
    with pytest.raises(ValueError, match="decode policy 'best' is not known: there are least_tpot"):
        RouterConfig(**engines, decode_policy="best")


def test_another_packages_policy_is_found_and_ours_stay_ours(tmp_path: Path) -> None:
    points = {"first": "toy:First", "seven": "toy:seven", "round_robin": "toy:First"}
    add_distribution(tmp_path, "toy", {"toy": MODULE}, {GROUP: points})
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "first", "round_robin", "seven"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    found, ours, wrong = done.stdout.splitlines()
    assert (found, ours) == ("First", "Sides")
    assert "package 'toy'" in wrong
    assert "must be a subclass of scheduler_plugins.router.policies.base.Policy" in wrong
