# SPDX-License-Identifier: Apache-2.0
"""The order of kernels and copies on two streams of a device.

The device is a simulation: work is queued by stream, runs later, and in any order that streams and events allow.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.pages import staging as module
from pd_connector.pages.staging import Stagings

DEVICE: Any = SimpleNamespace(type="cuda")
NBYTES = 8


class Stream:
    def __init__(self) -> None:
        self.queue: list[Callable[[], bool]] = []  # each returns whether it is done


class Event:
    def __init__(self, device: "Device") -> None:
        self._device = device
        self.happened = False

    def wait(self, stream: Stream | None) -> None:
        (stream or self._device.current).queue.append(lambda: self.happened)

    def synchronize(self) -> None:
        while not self.happened:
            self._device.run_one()

    def happen(self) -> bool:
        self.happened = True
        return True


class Memory:
    """A room or a slot that holds one value."""

    def __init__(self, device: "Device", value: object = None, nbytes: int = NBYTES) -> None:
        self._device = device
        self.value = value
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> "Memory":
        return self

    def copy_(self, source: "Memory", non_blocking: bool) -> None:
        def copy() -> bool:
            self.value = source.value
            return True

        self._device.current.queue.append(copy)


class Device:
    """Two streams. `kernels` is current unless copies are queued."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kernels, self.copies = Stream(), Stream()
        self.current = self.kernels

    def record(self, device: object) -> Event:
        event = Event(self)
        self.current.queue.append(event.happen)
        return event

    def stream(self, stream: Stream) -> Any:
        device = self

        class Current:
            def __enter__(self) -> None:
                device.current = stream

            def __exit__(self, *_: object) -> None:
                device.current = device.kernels

        return Current()

    def run_one(self) -> None:
        """Some stream's next work is done, if it need not wait for the other stream."""
        streams = [s for s in (self.kernels, self.copies) if s.queue]
        assert streams, "waits for what was never queued"
        for stream in self.random.sample(streams, len(streams)):
            if stream.queue[0]():
                del stream.queue[0]
                return
        raise AssertionError("both streams wait for each other")

    def kernel(self, work: Callable[[], None]) -> None:
        def run() -> bool:
            work()
            return True

        self.kernels.queue.append(run)


@pytest.fixture
def make_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[Device, Stagings]]:
    def make(seed: int) -> tuple[Device, Stagings]:
        device = Device(seed)
        monkeypatch.setattr(module, "record", device.record)
        monkeypatch.setattr(module.torch.cuda, "stream", device.stream)
        monkeypatch.setattr(module.torch, "empty", lambda n, **_: Memory(device, nbytes=n))
        monkeypatch.setattr(module, "address_of", id)
        return device, Stagings(DEVICE, device.copies)  # type: ignore[arg-type]

    return make


def wrong_bytes(device: Device, stagings: Stagings) -> list[str]:
    """Twenty chunks either way, with one ahead of the one that is waited for; returns what went wrong."""
    wrong: list[str] = []
    waiting: list[tuple[Event, Callable[[], str]]] = []
    staged: Any = None
    for number in range(20):
        if device.random.random() < 0.5:
            waiting.append(gather(device, stagings, number))
        else:
            payload = staged or Memory(device, f"payload {number}")
            waiting.append(scatter(device, stagings, payload))
            staged = Memory(device, f"next of {number}") if device.random.random() < 0.7 else None
            if staged is not None:
                stagings.load(staged, staged)
        if len(waiting) > 1:
            event, look = waiting.pop(0)
            event.synchronize()
            wrong += filter(None, [look()])
    for event, look in waiting:
        event.synchronize()
        wrong += filter(None, [look()])
    stagings.settle()
    return wrong


def gather(device: Device, stagings: Stagings, number: int) -> tuple[Event, Callable[[], str]]:
    slot = Memory(device)
    staging = stagings.empty(NBYTES)
    room: Any = staging.room
    device.kernel(lambda: setattr(room, "value", number))
    stagings.unload(staging, slot)  # type: ignore[arg-type]
    event: Any = staging.free
    return event, lambda: "" if slot.value == number else f"slot {number} has {slot.value}"


def scatter(device: Device, stagings: Stagings, payload: Memory) -> tuple[Event, Callable[[], str]]:
    staging = stagings.loaded(payload, lambda: payload)  # type: ignore[arg-type, return-value]
    room: Any = staging.room
    read: list[object] = []
    device.kernel(lambda: read.append(room.value))
    event: Any = device.record(None)
    staging.free = event
    return event, lambda: "" if read == [payload.value] else f"read {read}, not {payload.value}"


@pytest.mark.parametrize("seed", range(50))
def test_whatever_order_the_device_takes_every_chunk_has_its_own_bytes(
    make_device: Callable[[int], tuple[Device, Stagings]], seed: int
) -> None:
    assert wrong_bytes(*make_device(seed)) == []


def test_without_the_waits_chunks_would_take_each_other_s_bytes(
    make_device: Callable[[int], tuple[Device, Stagings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_wait", lambda event, stream: None)
    assert any(wrong_bytes(*make_device(seed)) for seed in range(10))


def test_a_staging_grows_and_nothing_reads_its_old_memory_any_more(
    make_device: Callable[[int], tuple[Device, Stagings]],
) -> None:
    device, stagings = make_device(0)
    gather(device, stagings, 1)
    gather(device, stagings, 2)
    old = stagings.empty(NBYTES)
    stagings.empty(NBYTES)
    assert old.free is not None
    assert not old.free.happened  # type: ignore[attr-defined]
    assert len(stagings.empty(2 * NBYTES).room) == 2 * NBYTES
    assert old.free.happened  # type: ignore[attr-defined]


def test_what_was_loaded_and_is_not_wanted_makes_room(
    make_device: Callable[[int], tuple[Device, Stagings]],
) -> None:
    """A chunk that was dropped: another payload is never taken for it."""
    device, stagings = make_device(0)
    dropped, wanted = Memory(device, "dropped"), Memory(device, "wanted")
    stagings.load(dropped, dropped)  # type: ignore[arg-type]
    event, look = scatter(device, stagings, wanted)
    event.synchronize()
    assert look() == ""
    stagings.load(dropped, dropped)  # type: ignore[arg-type]
    stagings.settle()
    assert stagings._loaded is None
    stagings.load(dropped, dropped)  # type: ignore[arg-type]
    stagings.empty(NBYTES)
    stagings.empty(NBYTES)
    assert stagings._loaded is None, "its room was given to others"
