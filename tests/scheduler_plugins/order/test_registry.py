# SPDX-License-Identifier: Apache-2.0
"""Policies are found by name: this package's own, and those that other packages add."""

from __future__ import annotations

import subprocess
import sys
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.distributions import add_distribution

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order import registry
from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.registry import GROUP, POLICIES, create
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.order.srjf import Srjf
from scheduler_plugins.queue.waiting import WaitingQueue

LONGEST_FIRST = """
from scheduler_plugins.order.base import QueuePolicy

class LongestFirst(QueuePolicy):
    def key(self, request, cached_tokens, cost_s):
        return -request.tokens

not_a_policy = 7
"""
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.file import QosError, parse
from scheduler_plugins.queue.waiting import WaitingQueue

class Costs:
    model = CostModel.token_count()

for name in sys.argv[2:]:
    try:
        settings = parse(f"scheduler: {{policy: {name}}}".encode()).scheduler
    except QosError as error:
        print(error)
        continue
    queue = WaitingQueue(create(settings.policy), set(), page_size=16, costs=Costs())
    for n, tokens in enumerate((5, 9, 7)):
        queue.add(Waiting(id=str(tokens), tokens=tokens, block_hashes=(), arrival_s=n))
    print(*(queue.pop().id for _ in range(3)))
"""


def said(folder: Path, *names: str) -> list[str]:
    """What a process that has the folder on its path says of these policies."""
    command = [sys.executable, "-c", PROGRAM, str(folder), *names]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


def test_another_packages_policy_orders_the_queue(tmp_path: Path) -> None:
    entry = {"longest_first": "toy_policies:LongestFirst", "srjf": "toy_policies:LongestFirst"}
    add_distribution(tmp_path, "toy", {"toy_policies": LONGEST_FIRST}, {GROUP: entry})
    # A name that is ours stays ours.
    assert said(tmp_path, "longest_first", "srjf") == ["9 7 5", "5 7 9"]


def test_a_policy_that_fails_ends_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue runs inside the engine's core: an exception there would end all of its requests."""

    class Costs:
        model = CostModel.token_count()

    class Fails(QueuePolicy):
        overtakes_running = splits_batches = True

        def key(self, request: Waiting, cached_tokens: int, cost_s: float) -> float:
            return {5: nan, 9: 1 / (request.tokens - 9)}.get(request.tokens, -1.0)

        def group(self, request: Waiting) -> int:
            return inf  # type: ignore[return-value]

        def wants_own_batch(self, request: Waiting) -> bool:
            raise KeyError("batch")

    point = SimpleNamespace(name="fails", source="package 'theirs'", load=lambda: Fails)
    monkeypatch.setattr(registry, "load_entry_points", lambda group: {"fails": point})
    queue = WaitingQueue(create("fails"), set(), page_size=16, costs=Costs())
    for n, tokens in enumerate((5, 9, 7, 5)):
        queue.add(Waiting(id=f"{n}", tokens=tokens, block_hashes=(), arrival_s=n))
    assert [queue.pop().id for _ in range(4)] == ["2", "0", "1", "3"]
    (first, *_) = caplog.messages
    assert "queue policy 'fails', which package 'theirs' adds, failed in key" in first
    assert "go by their arrival" in first
    assert len(caplog.messages) == len(set(caplog.messages)) <= 4, "not a line for each request"


def test_what_cannot_be_used_is_named_with_its_package(tmp_path: Path) -> None:
    entry = {"seven": "toy_policies:not_a_policy"}
    add_distribution(tmp_path, "toy", {"toy_policies": LONGEST_FIRST}, {GROUP: entry})
    wrong, unknown = said(tmp_path, "seven", "eight")
    assert "package 'toy'" in wrong
    assert "must be a subclass of scheduler_plugins.order.base.QueuePolicy" in wrong
    assert "policy 'eight' is not known: there are fcfs, " in unknown
    assert "seven" in unknown


def test_own_policies_need_no_other_package() -> None:
    assert isinstance(create("srjf"), Srjf)
    assert all(create(name) for name in POLICIES)
    with pytest.raises(ValueError, match="policy 'sfrj' is not known"):
        create("sfrj")
