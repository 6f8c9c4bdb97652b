# SPDX-License-Identifier: Apache-2.0
"""Which threads use a device: each of ours says so before it makes its first call."""

import threading
from typing import Any

import pytest
import torch
from support.setups import Layer, Setup

from pd_connector.memory.cuda_driver import CudaError
from pd_connector.pages import own_stream
from pd_connector.pages.own_stream import own_streams, own_thread
from pd_connector.plan.route import routes

GPU = torch.device("cuda", 2)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """By which threads torch's device and the driver's context were made current."""
    found: list[tuple[str, str, Any]] = []

    def note(what: str) -> Any:
        return lambda device: found.append((threading.current_thread().name, what, device))

    monkeypatch.setattr(torch.cuda, "set_device", note("torch"))
    monkeypatch.setattr(own_stream, "enter_thread", note("driver"))
    return found


def test_a_thread_has_the_device_and_its_context(entered: list[tuple[str, str, Any]]) -> None:
    own_thread(torch.device("cpu"))
    assert entered == []
    own_thread(GPU)
    name = threading.current_thread().name
    assert entered == [(name, "torch", GPU), (name, "driver", 2)]


@pytest.mark.usefixtures("entered")
def test_a_thread_goes_on_where_the_driver_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end in the agent's thread, before the agent can be started again."""

    def refuse(_: int) -> None:
        raise CudaError("cuCtxSetCurrent: CUDA_ERROR_DEINITIALIZED (4)")

    monkeypatch.setattr(own_stream, "enter_thread", refuse)
    own_thread(GPU)
    assert "CUDA_ERROR_DEINITIALIZED" in caplog.text


def test_a_cache_takes_a_stream_of_torch_where_the_driver_refuses_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(device: int, priority: int) -> int:
        raise CudaError("cuStreamCreateWithPriority: CUDA_ERROR_OUT_OF_MEMORY (2)")

    monkeypatch.setattr(own_stream, "new_stream", refuse)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority))
    assert own_streams(GPU) == ((GPU, -1), (GPU, -1))
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert own_streams(torch.device("cpu")) == (None, None)


def test_the_thread_that_compiles_is_one_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_pages = pytest.importorskip("pd_connector.pages.kernel_pages", exc_type=ImportError)
    entered: list[tuple[str, torch.device]] = []
    name = threading.current_thread().name
    monkeypatch.setattr(
        kernel_pages,
        "own_thread",
        lambda device: entered.append((threading.current_thread().name, device)),
    )
    pages = kernel_pages.KernelPages({}, torch.device("cpu"))
    monkeypatch.setattr(pages, "_kinds", lambda *_: ())
    (geometry,) = Setup().geometries((Layer(2),))
    (route,) = routes(geometry, geometry, ("raw",), ("raw",))
    pages.prepare(route, gathers=True)
    assert pages._warm_up.usable(route, True)
    assert [device.type for _, device in entered] == ["cpu"]
    assert entered[0][0] != name
