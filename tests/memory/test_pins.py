# SPDX-License-Identifier: Apache-2.0
"""What is pinned for a GPU, and that it never stays pinned after it has been unmapped.

CUDA's runtime is a fake here, which looks at this process' own memory map.
"""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.agents import LONG, TRANSPORTS, Ranks, assert_pages, ranks, until

from pd_connector.memory import cuda_driver
from pd_connector.memory import pins as module
from pd_connector.memory.pins import Pins
from pd_connector.memory.slab import Slab
from pd_connector.pages.paged_cache import PagedCache

__all__ = ["ranks"]

GPU = torch.device("cuda", 0)
READ_ONLY = 8


def is_mapped(address: int, nbytes: int) -> bool:
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().split("\n")[:-1]
    ]
    held = sum(
        max(0, min(int(stop, 16), address + nbytes) - max(int(start, 16), address))
        for start, stop in spans
    )
    return held == nbytes


class Runtime:
    """The calls of CUDA's runtime that pin. `wrong` is what a device would have suffered."""

    def __init__(self) -> None:
        self.pinned: dict[int, tuple[int, int]] = {}
        self.registered: list[tuple[int, int]] = []  # bytes, flags
        self.wrong: list[str] = []
        self.refuses = 0  # with this error

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if self.refuses:
            return self.refuses
        if not is_mapped(address, nbytes):
            self.wrong.append("registered what is not there")
        if address in self.pinned:
            self.wrong.append("registered twice")
        self.pinned[address] = nbytes, flags
        self.registered.append((nbytes, flags))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if address not in self.pinned:
            self.wrong.append("unregistered what was not registered")
            return 713
        nbytes, _ = self.pinned.pop(address)
        if not is_mapped(address, nbytes):
            self.wrong.append("unregistered after it was unmapped")
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    fake = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(cuda_driver, "supports", lambda attribute, device: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    yield fake
    assert not fake.pinned, "everything is unpinned in the end"
    assert not fake.wrong


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices whose last error was taken away, so that no kernel is blamed for it."""
    seen: list[torch.device] = []
    monkeypatch.setattr(module, "_forget_error", seen.append)
    return seen


@pytest.mark.parametrize("shared", [True, False])
def test_memory_is_pinned_whole_and_unpinned_before_its_slab_closes(
    runtime: Runtime, shared: bool
) -> None:
    slab, pins = Slab(2, 1 << 20, shared=shared), Pins(GPU)
    pins.pin(slab.memory, "slots")
    assert list(runtime.pinned) == [slab.address]
    assert runtime.registered == [(2 << 20, 1)]
    pins.release()
    assert not runtime.pinned
    pins.release()
    slab.close()


@pytest.mark.parametrize("shared", [True, False])
def test_memory_that_goes_by_itself_is_unpinned_while_it_is_still_there(
    runtime: Runtime, shared: bool
) -> None:
    slab, pins = Slab(2, 1 << 20, shared=shared), Pins(GPU)
    pins.pin(slab.memory, "slots")
    address, view = slab.address, slab.slot(1, 100)
    slab.close()
    del slab
    gc.collect()
    assert runtime.pinned, "a view keeps it, and keeps it pinned"
    view.release()
    del view
    gc.collect()
    assert not runtime.pinned
    if shared:
        assert not is_mapped(address, 2 << 20)
    pins.release()


def test_the_fake_sees_memory_that_was_unmapped_first() -> None:
    """What `Pins` is there to prevent."""
    runtime, slab = Runtime(), Slab(2, 1 << 20, shared=True)
    address = slab.address
    runtime.cudaHostRegister(address, slab.nbytes, 1)
    slab.close()
    runtime.cudaHostUnregister(address)
    assert runtime.wrong == ["unregistered after it was unmapped"]


def test_nothing_is_asked_of_cuda_for_a_cache_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "cudart", never)
    monkeypatch.setattr(torch.cuda, "device", never)
    memory = np.zeros(4096, np.uint8)
    for device in (None, torch.device("cpu")):
        Pins(device).pin(memory, "slots")
    producer, consumer = ranks.pair(LONG | TRANSPORTS["shm"])
    producer.offer("t", [5, 3])
    consumer.load(producer.source, "t", [20, 1])
    assert consumer.loaded("t").cause is None
    with pytest.raises(AssertionError, match="CUDA was asked"):
        Pins(GPU).pin(memory, "slots")


def test_what_cannot_be_pinned_is_a_warning_that_says_what_to_do(
    runtime: Runtime, forgotten: list[torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuses = 2
    slab, pins = Slab(2, 1 << 20), Pins(GPU)
    pins.pin(slab.memory, "landing slots")
    assert "landing slots (2097152 bytes) cannot be pinned" in caplog.text
    assert "error 2" in caplog.text
    assert "ulimit -l" in caplog.text
    assert forgotten == [GPU]
    pins.release()
    del slab
    gc.collect()


def test_memory_that_stays_pinned_is_a_warning_and_no_kernel_is_blamed(
    runtime: Runtime,
    forgotten: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`release` ends an agent, and goes on."""
    pins, memory = Pins(torch.device("cuda", 0)), np.zeros(4096, np.uint8)
    pins.pin(memory, "slots")
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "cudaHostUnregister", lambda address: 4)
        pins.release()
    assert "stays pinned (cudaHostUnregister: error 4)" in caplog.text
    assert forgotten == [torch.device("cuda", 0)]
    runtime.pinned.clear()


@pytest.mark.parametrize("answer", ["no", "none"])
def test_memory_for_reading_is_pinned_where_the_device_says_that_it_can(
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: str,
) -> None:
    """Without a driver to ask, the call itself says so."""

    def supports(attribute: int, device: int) -> bool:
        assert (attribute, device) == (113, 0)
        if answer == "none":
            raise cuda_driver.CudaError("no CUDA driver")
        return False

    monkeypatch.setattr(cuda_driver, "supports", supports)
    slab, pins = Slab(2, 1 << 20), Pins(GPU)
    pins.pin(slab.memory, "slots of a producer", read_only=True)
    assert runtime.registered == ([(2 << 20, 1 | READ_ONLY)] if answer == "none" else [])
    assert ("mapped for reading only" in caplog.text) is (answer == "no")
    pins.release()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shared", [True, False])
def test_a_gpu_takes_slots_for_pinned_memory_until_they_are_released(shared: bool) -> None:
    slab, pins = Slab(2, 1 << 20, shared=shared), Pins(GPU)
    pins.pin(slab.memory, "slots")
    assert torch.from_numpy(slab.memory).is_pinned()
    pins.release()
    assert not torch.from_numpy(slab.memory).is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_next_kernel_is_not_blamed_for_what_could_not_be_pinned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slab, pins = Slab(2, 1 << 20), Pins(GPU)
    for _ in range(2):
        pins.pin(slab.memory, "slots")
    assert caplog.text.count("cannot be pinned") == 1
    assert torch.ones(8, device=GPU).sum().item() == 8
    pins.release()


# Whole transfers between agents that take their caches for a GPU's.

SLABS = {  # what is mapped for writing, and only for reading, and pinned by both agents together
    "shm": (2, 1),
    "shm written": (2, 1),
    "tcp": (2, 0),
}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedCache, "device", GPU)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("transport", SLABS)
def test_agents_pin_all_memory_of_slots_once_and_unpin_it_when_they_close(
    runtime: Runtime, ranks: Ranks, transport: str
) -> None:
    """What is under way at the end included: the fixtures look."""
    producer, consumer = ranks.pair(LONG | TRANSPORTS[transport])
    slots = LONG["slots"] * LONG["slot_mib"] << 20
    assert runtime.registered == [(slots, 1)] * 2, "at the start, before any transfer"
    for transfer, into in (("a", [20, 1]), ("b", [2, 7])):
        producer.offer(transfer, [5, 3])
        consumer.load(producer.source, transfer, into)
        assert consumer.loaded(transfer).cause is None
        assert_pages(producer, [5, 3], consumer, into)
    writable, only_read = SLABS[transport]
    assert runtime.registered == [(slots, 1)] * writable + [(slots, 1 | READ_ONLY)] * only_read
    assert len(runtime.pinned) == writable + only_read


@pytest.mark.usefixtures("on_gpu")
def test_the_slots_of_a_producer_that_has_gone_are_unpinned_at_once(
    runtime: Runtime, ranks: Ranks
) -> None:
    producer, consumer = ranks.pair(LONG | TRANSPORTS["shm"])
    producer.offer("t", [5, 3])
    consumer.load(producer.source, "t", [20, 1])
    assert consumer.loaded("t").cause is None
    ranks.stop(producer)
    until(lambda: len(runtime.pinned) == 1, "only the consumer's own slots are pinned")


@pytest.mark.usefixtures("on_gpu")
def test_transfers_go_on_where_nothing_can_be_pinned(
    runtime: Runtime, ranks: Ranks, forgotten: list[torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuses = 801
    producer, consumer = ranks.pair(LONG | TRANSPORTS["shm"])
    producer.offer("t", [5, 3])
    consumer.load(producer.source, "t", [20, 1])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [5, 3], consumer, [20, 1])
    assert caplog.text.count("cannot be pinned") == len(forgotten) == 3
