# SPDX-License-Identifier: Apache-2.0
"""Triton's own driver and launchers over a libcuda without a GPU (`libcuda.c`): a launch executes the kernel
that Triton compiled for sm_90a."""

import atexit
import ctypes
import gc
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from device_memory import MEMORY
from streams import STREAMS

SOURCE = Path(__file__).with_name("libcuda.c")
INCLUDE = Path(triton.__file__).parent / "backends/nvidia/include"
LAUNCH = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint, ctypes.c_uint),
    *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64),
)
LEND, NEW_STREAM = (
    ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64),
    ctypes.CFUNCTYPE(ctypes.c_uint64),
)


class Launched(NamedTuple):
    """A launch as the driver is told of it. `parameters` are addresses of the kernel's parameters; `arguments` are
    what Triton's launcher was given, tensors among them."""

    ptx: Path
    grid: tuple[int, int, int]
    threads: int
    shared: int
    parameters: Any
    stream: int
    arguments: tuple[Any, ...]


_LAUNCHING = threading.local()


class Driver:
    """Installs itself as Triton's driver. `execute` is called for each launch; what it raises, the
    launch raises."""

    def __init__(self, execute: Callable[[Launched], None]) -> None:
        self.execute = execute
        self.sources: dict[int, Path] = {}
        self.error: BaseException | None = None
        self.folder = tempfile.TemporaryDirectory()
        library = Path(self.folder.name, "libcuda.so.1")
        subprocess.run(
            [
                "cc",
                *["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"],
                "-I",
                INCLUDE,
                "-o",
                library,
                SOURCE,
            ],
            check=True,
        )
        os.environ["TRITON_LIBCUDA_PATH"] = self.folder.name
        self.library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.callback = LAUNCH(self._launched)
        self.library.emulator_on_launch(self.callback)
        self.lend, self.new_stream = LEND(_lend), NEW_STREAM(STREAMS.new_handle)
        self.library.emulator_on_memory(self.lend, self.new_stream)
        triton.knobs.runtime.kernel_load_end_hook.add(self._loaded)
        triton.runtime.driver.set_active(_driver())

    def _loaded(self, module: int, function: int, name: str, files: Any, *_: Any) -> None:
        STREAMS.forbid_in_capture(f"{name} is loaded")
        (path,) = (path for file, path in files.items() if file.endswith(".ptx"))
        self.sources[function] = Path(path)

    def _launched(self, function: int, grid: Any, threads: int, shared: int, *given: Any) -> int:
        try:
            x, y, z = grid[:3]
            told = self.sources[function], (x, y, z), threads, shared
            self.execute(Launched(*told, *given, _LAUNCHING.arguments))
        except BaseException as error:
            self.error = error
            return 1
        return 0

    def raise_fault(self) -> None:
        """Raise what the launches since the last call have raised."""
        error, self.error = self.error, None
        if error is not None:
            raise error


def _driver() -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia

    class Launcher(nvidia.CudaLauncher):  # type: ignore[misc]
        def __call__(self, *given: Any) -> None:
            _LAUNCHING.arguments = given
            try:
                super().__call__(*given)
            finally:
                del _LAUNCHING.arguments  # which would keep tensors from being freed

    class Hopper(nvidia.CudaDriver):  # type: ignore[misc]
        """Triton's driver, told what torch would know of a GPU."""

        def __init__(self) -> None:
            self.utils = nvidia.CudaUtils()
            self.launcher_cls = Launcher
            self.get_device_capability = lambda _: (9, 0)
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda _: STREAMS.current.cuda_stream if STREAMS.used else 0
            self.set_current_device = lambda _: None

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    return Hopper()


def _lend(address: int, nbytes: int) -> int:
    if nbytes:
        return MEMORY.lend(nbytes).address
    MEMORY.give_back(address)
    return 0


_LASTING: list[torch.Tensor] = []
"""Tensors of modules, which live as long as this process."""


def pass_over_modules() -> None:
    """From here on `live_memory` looks at objects that are made later, and not at the 200,000 of what has been
    imported."""
    gc.collect()
    _LASTING.extend(each for each in gc.get_objects() if type(each) is torch.Tensor)
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton's library counts what has not been freed


def live_memory() -> tuple[np.ndarray, np.ndarray]:
    """First and last address, and one more, of the memory of each torch tensor that is alive; what lies between,
    a kernel must not touch."""
    spans = set()
    for each in [*_LASTING, *gc.get_objects()]:
        if type(each) is torch.Tensor and each.device.type == "cpu":
            storage = each.untyped_storage()
            if storage.nbytes():
                spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    starts, ends = np.array(sorted(spans), np.int64).reshape(-1, 2).T
    return starts, ends
