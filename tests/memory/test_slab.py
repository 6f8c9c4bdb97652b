# SPDX-License-Identifier: Apache-2.0
"""Slots are lent to one owner at a time, and every one comes home."""

import mmap
import os
from collections.abc import Hashable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_connector.memory.slab import Slab, SlotPool

SLOTS = 5
OWNERS: list[Hashable] = ["a", ("a", 1), ("a", 2)]


class Pool(RuleBasedStateMachine):
    """A pool beside a model of it: where each slot is, and until when it is quarantined."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(SLOTS)
        self.held: dict[int, Hashable] = {}
        self.quarantined: dict[int, float] = {}
        self.now = 0.0

    @rule(owner=st.sampled_from(OWNERS))
    def take(self, owner: Hashable) -> None:
        slot = self.pool.lend(owner)
        if slot is None:
            assert len(self.held) + len(self.quarantined) == SLOTS
        else:
            assert slot not in self.held
            assert slot not in self.quarantined
            self.held[slot] = owner

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.give_back(slot)
        del self.held[slot]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), seconds=st.floats(0, 10))
    def quarantine(self, data: st.DataObject, seconds: float) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.quarantine(slot, self.now + seconds)
        del self.held[slot]
        self.quarantined[slot] = self.now + seconds

    @rule(slots=st.lists(st.integers(0, SLOTS)))
    def release_quarantined(self, slots: list[int]) -> None:
        self.pool.release_quarantined(slots)
        for slot in slots:
            self.quarantined.pop(slot, None)

    @rule(seconds=st.floats(0, 5))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.pool.tick(self.now)
        self.quarantined = {s: t for s, t in self.quarantined.items() if t > self.now}

    @rule(slot=st.integers(-1, SLOTS))
    def free_or_quarantine_what_is_not_held(self, slot: int) -> None:
        if slot not in self.held:
            with pytest.raises(KeyError):
                self.pool.give_back(slot)
            with pytest.raises(KeyError):
                self.pool.quarantine(slot, self.now)

    @invariant()
    def no_slot_is_lost_or_doubled(self) -> None:
        assert self.pool.held == len(self.held) + len(self.quarantined)
        assert self.pool.free + self.pool.held == SLOTS
        self.pool.check_integrity()

    @invariant()
    def holders_are_known(self) -> None:
        for slot in range(SLOTS):
            for owner in OWNERS:
                assert self.pool.holds(owner, slot) == (self.held.get(slot) == owner)


Pool.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase


def test_the_slot_that_has_been_free_longest_is_lent_first() -> None:
    pool = SlotPool(3)
    assert [pool.lend("a") for _ in range(3)] == [0, 1, 2]
    for slot in (1, 0, 2):
        pool.give_back(slot)
    assert [pool.lend("a") for _ in range(4)] == [1, 0, 2, None]


@pytest.mark.parametrize("shared", [False, True])
def test_slots_are_writable_and_do_not_overlap(shared: bool) -> None:
    slab = Slab(4, 100, shared=shared)
    for index in range(4):
        slab.slot(index)[:] = bytes([index]) * 100
    assert [bytes(slab.slot(index)) for index in range(4)] == [bytes([i]) * 100 for i in range(4)]
    assert slab.slot(2, 7).nbytes == 7
    assert slab.slot(2, 0).nbytes == 0
    slab.close()


def test_only_a_shared_slab_has_a_handle_and_its_memory_is_the_slots() -> None:
    private, shared = Slab(2, 4096), Slab(2, 4096, shared=True)
    assert private.handle == -1
    with mmap.mmap(shared.handle, shared.nbytes) as window:
        window[4096:4099] = b"abc"
        assert bytes(shared.slot(1, 3)) == b"abc"
    shared.close()


def test_a_shared_slab_cannot_be_cut_short_under_who_maps_it() -> None:
    slab = Slab(2, 4096, shared=True)
    for nbytes in (0, 3 * 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.handle, nbytes)
    slab.close()


def test_closing_gives_back_the_handle_once_and_slots_in_use_stay_readable() -> None:
    before = len(os.listdir("/proc/self/fd"))
    slab = Slab(2, 4096, shared=True)
    slot = slab.slot(1)
    slot[:3] = b"abc"
    slab.close()
    slab.close()
    assert bytes(slot[:3]) == b"abc"
    del slot
    assert len(os.listdir("/proc/self/fd")) == before


def test_untouched_slots_cost_no_memory() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE

    before = resident()
    slab = Slab(64, 4 << 20)
    assert slab.nbytes == 256 << 20
    assert resident() - before < 64 << 20


@pytest.mark.parametrize("damage", ["lost", "doubled", "unknown"])
def test_a_slot_that_is_not_somewhere_exactly_once_is_named(damage: str) -> None:
    pool = SlotPool(3)
    taken = pool.lend("a")
    assert taken == 0
    pool.check_integrity()
    if damage == "lost":
        pool._holder.clear()
    elif damage == "doubled":
        pool._free.append(taken)
    else:
        pool._quarantine[7] = 1.0
    with pytest.raises(AssertionError, match="each of 3 slots must be there once"):
        pool.check_integrity()
