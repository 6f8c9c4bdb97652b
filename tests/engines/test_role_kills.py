# SPDX-License-Identifier: Apache-2.0
"""Engines of two ranks and of one swap roles under load, and processes are killed in the middle of the swap.

Users of routers that live lose nothing: what a killed engine had, another one goes on with. Users of a killed router
lose what it was serving. Afterwards the engines hold nothing, and serve as before.

PD_ROLE_KILLS_S=120 adds two minutes of such kills at random.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import pytest
from harness import wait_until
from pairs import Pair, Setup
from steered import Steered, Users
from tools import delta

# What is killed here hangs on routers, not on a model runner, and engines start often: V1 is faster.
SETUP = Setup.of(
    vllm="0.32 V1",
    prefill_args=["--tensor-parallel-size", "2"],
    both=True,
    # Recovery is seen within a test; the behaviour is the same.
    transports=["tcp"],
    lease_s=6,
    heartbeat_s=0.5,
    session_timeout_s=3,
    stall_timeout_s=6,
    connect_timeout_s=4,
)
LOOP_S = float(os.environ.get("PD_ROLE_KILLS_S", "0"))
NEAR_S = 0.03
"""A kill comes within this time of a swap, before or after its beginning."""
_RECEIVED = "pd_connector:received_transfers_total"


class Fleet:
    """Two engines, two routers that hear each other, and which engine prefills."""

    def __init__(self, pair: Pair, routers: list[Steered]) -> None:
        self.pair = pair
        self.routers = routers
        self._order = pair.p, pair.d
        self._random = random.Random(0)

    @property
    def wanted(self) -> dict[str, str]:
        prefill, decode = self._order
        return {prefill.base_url: "prefill", decode.base_url: "decode"}

    def swap(self, router: Steered) -> None:
        self._order = self._order[::-1]
        router.swap(*(one.base_url for one in self._order))

    @contextmanager
    def swapping(self, router: Steered) -> Iterator[None]:
        """A swap begins within `NEAR_S` of the block. The router may not live to answer."""

        def swap() -> None:
            time.sleep(begins_s)
            with suppress(OSError, HTTPException):
                self.swap(router)

        kills_s, begins_s = (self._random.uniform(0, NEAR_S) for _ in range(2))
        thread = threading.Thread(target=swap)
        thread.start()
        time.sleep(kills_s)
        yield
        thread.join()

    def settle(self) -> None:
        """Wait until both routers have the roles that the operator wanted, and all engines are up."""

        def settled() -> bool:
            for router in self.routers:
                told = router.ask("/engines")["engines"]
                if {one["url"]: one["role"] for one in told} != self.wanted:
                    return False
                if any(one["state"] != "up" for one in told) or not router.ready():
                    return False
            return True

        wait_until(settled, lambda: f"roles {self.wanted}; are {[r.roles() for r in self.routers]}")

    def hands_over(self, users: Users) -> None:
        """Wait until KV moves between the engines again."""
        with delta(self._order[1], _RECEIVED) as moved:
            wait_until(lambda: moved.so_far() > 0, "KV moves as roles say", every_s=0.2)
        users.wait_for(2)

    def kill_engine(self, users: Users, which: int) -> None:
        """`which`: 0 for the one that prefills, 1 for the one that decodes, before the swap."""
        engine, router = self._order[which], self._random.choice(self.routers)
        with self.swapping(router):
            engine.kill()
        users.wait_for(3)
        engine.start().wait_ready()
        self.settle()
        self.hands_over(users)

    def kill_leader(self, users: Users) -> None:
        """The router that decides on roles is killed while it makes a swap. The other one keeps the roles."""
        wait_until(lambda: any(one.leads for one in self.routers), "one router leads")
        leader = next(one for one in self.routers if one.leads)
        (other,) = (one for one in self.routers if one is not leader)
        with self.swapping(leader):
            users.reach = (other,)
            leader.kill()
        assert {one.router for one in users.lost()} <= {leader}, (
            "the other one's users lose nothing"
        )
        roles = other.roles()
        assert sorted(roles.values()) == ["decode", "prefill"], (
            "a swap is made whole, or not at all"
        )
        users.wait_for(3)
        self.swap(other)
        users.wait_for(3)
        leader.start().wait_ready()
        self.settle()
        users.reach = tuple(self.routers)
        self.hands_over(users)

    def kill_all_routers(self, users: Users) -> None:
        """Nobody is left who knows the roles. They begin at home."""
        with self.swapping(self.routers[0]):
            for router in self.routers:
                router.kill()
        for router in self.routers:
            router.start()
        for router in self.routers:
            router.wait_ready()
        self._order = self.pair.p, self.pair.d
        self.settle()
        self.hands_over(users)


@pytest.fixture
def fleet(pair: Pair, tmp_path: Path) -> Iterator[Fleet]:
    routers = [Steered(pair, tmp_path / f"router{n}.log", "--roles", "pressure") for n in range(2)]
    addresses = [f"tcp://127.0.0.1:{one.reserve()}" for one in routers]
    with ExitStack() as running:
        for n, router in enumerate(routers):
            router.args += ["--exchange", addresses[n], "--fellows", addresses[1 - n]]
            running.enter_context(router)
        for router in routers:
            router.wait_ready()
        yield Fleet(pair, routers)
        pair.assert_idle()


def test_an_engine_of_two_ranks_and_one_of_one_swap_under_load(fleet: Fleet, reference) -> None:
    with (
        delta(fleet.pair.p, _RECEIVED) as there,
        delta(fleet.pair.d, _RECEIVED) as back,
        Users(*fleet.routers).asking() as users,
    ):
        for n in range(4):
            fleet.swap(fleet.routers[n % 2])
            users.wait_for(4)
    assert min(there.amount, back.amount) > 0, "KV moved both ways"
    assert users.lost() == []
    users.assert_answers(reference)


@pytest.mark.parametrize("which", [0, 1], ids=["prefills", "decodes"])
def test_a_moving_engine_is_killed_and_no_user_sees_it(fleet: Fleet, which: int, reference) -> None:
    with Users(*fleet.routers).asking() as users:
        users.wait_for(3)
        fleet.kill_engine(users, which)
    assert users.lost() == []
    users.assert_answers(reference)


def test_the_leader_is_killed_and_users_of_the_other_router_see_nothing(
    fleet: Fleet, reference
) -> None:
    with Users(*fleet.routers).asking() as users:
        users.wait_for(3)
        fleet.kill_leader(users)
    assert len(users.lost()) <= 2, "what the leader was serving"
    users.assert_answers(reference)


def test_all_routers_are_killed_and_the_engines_hold_nothing(fleet: Fleet, reference) -> None:
    with Users(*fleet.routers).asking() as users:
        users.wait_for(3)
        fleet.kill_all_routers(users)
    # Routers are killed one after the other, so a user can lose a request at each.
    assert len(users.lost()) <= 2 * len(fleet.routers), "what they were serving"
    users.assert_answers(reference)
    fleet.pair.assert_idle()


@pytest.mark.skipif(not LOOP_S, reason="PD_ROLE_KILLS_S is not set")
def test_kills_at_random(fleet: Fleet, reference) -> None:
    faults: dict[str, Callable[[Users], None]] = {
        "prefill engine": lambda users: fleet.kill_engine(users, 0),
        "decode engine": lambda users: fleet.kill_engine(users, 1),
        "leader": fleet.kill_leader,
        "all routers": fleet.kill_all_routers,
    }
    counts, lost, asked = dict.fromkeys(faults, 0), 0, 0
    until_s, chosen = time.monotonic() + LOOP_S, random.Random(1)
    while time.monotonic() < until_s:
        fault = chosen.choice(list(faults))
        with Users(*fleet.routers).asking() as users:
            faults[fault](users)
        counts[fault] += 1
        asked += len(users.asked)
        users.assert_answers(reference)
        if "engine" in fault:
            assert users.lost() == [], fault
        lost += len(users.lost())
    print(f"{counts}: {asked} requests, {lost} lost with their router")
