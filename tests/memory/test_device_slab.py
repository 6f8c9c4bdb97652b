# SPDX-License-Identifier: Apache-2.0
"""Slots in device memory: where they come from, when they go, and when there are none.

CUDA's driver is a fake here, whose device memory is host memory.
"""

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.memory import cuda_driver, device_slab
from pd_connector.memory.device_bytes import DeviceBytes, address_of
from pd_connector.memory.device_slab import (
    LEAST_FREE_BYTES,
    DeviceMemoryError,
    DeviceSlab,
    filled_on_host,
)
from pd_connector.memory.slot_memory import WhyHost, choose_slot_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)
OUT_OF_MEMORY = 2


class Driver:
    """The calls of `libcuda.so.1` that are used."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}
        self.contexts: list[int] = []  # those that are pushed, by their device
        self.retained = 0
        self.refuses = 0
        self.streams: list[tuple[int, int]] = []
        self.attributes = {113: 1}
        self.current: list[int] = []  # contexts that were made current for good, by their device
        self.capture_modes: list[int] = []

    def cuDeviceGet(self, handle: Any, device: ctypes.c_int) -> int:  # noqa: N802
        handle._obj.value = 100 + device.value
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:  # noqa: N802
        self.retained += 1
        context._obj.value = device.value
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> int:  # noqa: N802
        self.retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.contexts.append(int(context.value or 0))
        return 0

    def cuCtxPopCurrent_v2(self, old: Any) -> int:  # noqa: N802
        self.contexts.pop()
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.current.append(int(context.value or 0))
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.capture_modes.append(mode._obj.value)
        return 0

    def cuMemAlloc_v2(self, address: Any, nbytes: ctypes.c_size_t) -> int:  # noqa: N802
        assert self.contexts == [103]
        if self.refuses:
            return self.refuses
        memory = ctypes.create_string_buffer(nbytes.value)
        address._obj.value = ctypes.addressof(memory)
        self.held[address._obj.value] = memory
        return 0

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:  # noqa: N802
        assert self.contexts == [103]
        del self.held[address.value]
        return 0

    def cuStreamCreateWithPriority(  # noqa: N802
        self, stream: Any, flags: ctypes.c_uint, priority: ctypes.c_int
    ) -> int:
        self.streams.append((flags.value, priority.value))
        stream._obj.value = 0x5000 + len(self.streams)
        return 0

    def cuDeviceGetAttribute(  # noqa: N802
        self, value: Any, attribute: ctypes.c_int, device: ctypes.c_int
    ) -> int:
        assert device.value == 103
        value._obj.value = self.attributes.get(attribute.value, 0)
        return 0

    def cuGetErrorName(self, code: ctypes.c_int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(cuda_driver, "_library", lambda: fake)
    yield fake
    gc.collect()
    assert not fake.held, "all memory is freed in the end"
    assert (fake.contexts, fake.retained) == ([], 0)


@pytest.fixture
def on_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """torch takes the fake's memory for a GPU's."""
    made = torch.as_tensor

    def as_tensor(owner: Any, device: torch.device) -> torch.Tensor:
        assert device == GPU
        memory = owner.__cuda_array_interface__
        view = (ctypes.c_uint8 * memory["shape"][0]).from_address(memory["data"][0])
        view.owner = owner  # type: ignore[attr-defined]  # torch keeps it as long as the memory
        return made(np.ctypeslib.as_array(view))

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (LEAST_FREE_BYTES * 2, 1 << 40))
    return driver


def test_memory_of_a_device_is_the_driver_s_and_is_freed_with_its_last_view(on_gpu: Driver) -> None:
    """Not of torch's pool, whose expandable segments no other process can map."""
    slab = DeviceSlab(2, 4096, GPU)
    assert list(on_gpu.held) == [slab.address]
    assert (slab.memory, slab.number, slab.nbytes) == ("VRAM", 3, 8192)
    view = slab.slot(1, 100)
    assert view.address == slab.address + 4096
    slab.close()
    del slab
    gc.collect()
    assert on_gpu.held, "a view keeps it"
    del view
    gc.collect()
    assert not on_gpu.held


def test_memory_that_nothing_was_gathered_into_is_not_zero(on_gpu: Driver) -> None:
    """Sums that were never formed are zero: those of zeros would be right."""
    for device in (CPU, GPU):
        slab = DeviceSlab(2, 64, device)
        assert set(bytes(slab.slot(0)) + bytes(slab.slot(1))) == {0xA5}


def test_a_device_keeps_memory_for_its_engine(
    on_gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (LEAST_FREE_BYTES + 8191, 1))
    with pytest.raises(DeviceMemoryError, match=r"--gpu-memory-utilization.*slot_mib"):
        DeviceSlab(2, 4096, GPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (LEAST_FREE_BYTES + 8192, 1))
    on_gpu.refuses = OUT_OF_MEMORY
    with pytest.raises(DeviceMemoryError, match=r"cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        DeviceSlab(2, 4096, GPU)
    on_gpu.refuses = 0
    assert DeviceSlab(2, 4096, GPU).slots == 2


def test_a_stream_of_our_own_comes_before_the_engine_s(driver: Driver) -> None:
    handles = {cuda_driver.new_stream(3, -1) for _ in range(2)}
    assert len(handles) == 2
    assert driver.streams == [(1, -1)] * 2, "waits for nobody's default stream"


def test_a_thread_of_our_own_is_not_stopped_by_another_s_capture(driver: Driver) -> None:
    cuda_driver.enter_thread(3)
    assert driver.current == [103]
    assert driver.capture_modes == [1], (
        "cudaStreamCaptureModeThreadLocal: captures of others do not count"
    )


def test_a_device_is_asked_what_it_supports(driver: Driver) -> None:
    assert cuda_driver.supports(cuda_driver.READ_ONLY_HOST_REGISTER_SUPPORTED, 3)
    driver.attributes[113] = 0
    assert not cuda_driver.supports(cuda_driver.READ_ONLY_HOST_REGISTER_SUPPORTED, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_there_is_an_error_and_no_crash() -> None:
    with pytest.raises(cuda_driver.CudaError):
        cuda_driver.allocate(4096, 0)


def test_bytes_on_a_device_stand_where_host_memory_would() -> None:
    slab = DeviceSlab(2, 64, CPU)
    slot = slab.slot(1)
    assert (len(slot), slot.nbytes, len(slot[:10])) == (64, 64, 10)
    with filled_on_host(slot[:10]) as payload:
        payload[:] = b"0123456789"
    assert bytes(slot)[:12] == b"0123456789\xa5\xa5"
    copied = slot.to_host()
    copied[0] = 1
    assert bytes(slot)[:1] == b"0", "a copy is a copy"
    host = memoryview(bytearray(8))
    with filled_on_host(host) as payload:
        assert payload is host
    assert address_of(slot[3:]) == address_of(slot) + 3
    assert address_of(host[3:]) == address_of(host) + 3
    assert isinstance(slot, DeviceBytes)


NIXL = ("shm", "nixl", "tcp")


@pytest.mark.parametrize(
    ("cache", "slots", "settings", "cause"),
    [
        (CPU, None, {"transports": NIXL}, None),
        (GPU, CPU, {"transports": NIXL, "slot_memory": "host"}, "config"),
        (GPU, CPU, {"transports": ("shm", "tcp")}, "transport"),
        (GPU, None, {"transports": NIXL}, "kernels"),
        (GPU, CPU, {"transports": NIXL}, ""),
        (CPU, CPU, {"transports": NIXL}, ""),
    ],
)
def test_the_reason_for_slots_in_host_memory_is_named(
    cache: torch.device, slots: torch.device | None, settings: dict[str, Any], cause: str | None
) -> None:
    config = Config(slot_mib=1, slots=2, **settings)
    made, why = choose_slot_memory(
        config,
        cache,
        slots,
        produces=True,
        consumes=False,
        reaches_devices="nixl" in config.transports,
    )
    assert (made.sending is not None, made.landing) == (cause == "", None), "what is not used"
    assert (why.cause if why else "") == (cause or "")
    if cause == "":
        must = Config(slot_mib=1, slots=2, slot_memory="device", **settings)
        made, _ = choose_slot_memory(
            must,
            cache,
            slots,
            produces=False,
            consumes=True,
            reaches_devices="nixl" in must.transports,
        )
        assert (made.landing is not None, made.sending) == (True, None)
    elif cause != "config":
        must = Config(slot_mib=1, slots=2, slot_memory="device", **settings)
        with pytest.raises(
            ConfigError, match=r"slot_memory 'device': .*\(config key slot_memory\)"
        ):
            choose_slot_memory(
                must,
                cache,
                slots,
                produces=True,
                consumes=True,
                reaches_devices="nixl" in must.transports,
            )


def test_a_device_without_room_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise DeviceMemoryError("4 MiB free")

    monkeypatch.setattr(device_slab, "_allocate", full)
    config = Config(slot_mib=1, transports=NIXL)
    made, why = choose_slot_memory(
        config, GPU, GPU, produces=True, consumes=True, reaches_devices=True
    )
    assert made.slabs == []
    assert why == WhyHost("memory", "4 MiB free")
    assert str(why) == "slots in host memory (memory: 4 MiB free)"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_s_slab_is_memory_that_torch_can_use_and_gives_back() -> None:
    """On a GPU's own driver. What is measured comes second: kernels are loaded by the first launch, into memory
    of the same device, and torch's pool takes some."""
    device = torch.device("cuda", 0)

    def used_once() -> int:
        """Bytes that the device has less while there is a slab."""
        before = torch.cuda.mem_get_info(device)[0]
        slab = DeviceSlab(4, 16 << 20, device)
        slot = slab.slot(3, 1000)
        slot.tensor.copy_(torch.arange(1000, device=device) % 251)
        assert bytes(slot) == bytes(number % 251 for number in range(1000))
        taken: int = before - torch.cuda.mem_get_info(device)[0]
        slab.close()
        del slab, slot
        gc.collect()
        return taken

    used_once()
    before = torch.cuda.mem_get_info(device)[0]
    assert 64 << 20 <= used_once() <= 66 << 20
    assert torch.cuda.mem_get_info(device)[0] >= before - (2 << 20)
    stream = torch.cuda.ExternalStream(cuda_driver.new_stream(0, -1), device=device)
    with torch.cuda.stream(stream):
        total = torch.ones(1000, device=device).sum()
    stream.synchronize()
    assert total.item() == 1000
