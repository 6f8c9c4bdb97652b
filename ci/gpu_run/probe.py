# SPDX-License-Identifier: Apache-2.0
"""Probes the machine and its copy speeds. Writes JSON to the given file."""

import ctypes
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("torch", "triton", "numpy", "vllm", "sglang", "nixl", "nixl-cu13", "flashinfer-python"),
    *("sgl-flash-mla", "flash-mla", "msgspec", "pyzmq", "cryptography", "xxhash", "pytest"),
)
QUERY = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,pcie.link.gen.max,pcie.link.width.max"
PROGRAMS = ("nvcc", "ptxas", "compute-sanitizer", "ncu", "cuobjdump")
TOLD = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH", "HOME", "TRITON_CACHE_DIR")
MIB = 1 << 20
GIB = 1 << 30
SIZE = 1024 * MIB
SMALL = 64 * MIB
"""Bytes per copy on a machine without a GPU."""

REGISTER_READ_ONLY = 0x08
"""`cudaHostRegisterReadOnly`, for memory that this process can only read."""


def main(path: str) -> int:
    """Probe the machine.

    Args:
        path: file for the figures.

    Returns:
        0; 2 if there is no GPU, which the last line of the output says. Failed probes are noted in the figures.
    """
    found: dict[str, Any] = {"machine": _machine(), "packages": _packages()}
    for name, measure in PROBES:
        try:
            found[name] = measure()
        except Exception as error:  # a failed probe must not stop the others
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        # Written each time, because the first import of torch on a host can take all the time.
        Path(path).write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    if reason := found["cuda"].get("none"):
        print(f"no GPU: {reason}")
        return 2
    return 0


def _machine() -> dict[str, Any]:
    places = {"tree": ".", "temporary": tempfile.gettempdir(), "shared memory": "/dev/shm"}
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "date": time.ctime(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "free_gib": {
            name: round(shutil.disk_usage(place).free / GIB, 1)
            for name, place in places.items()
            if Path(place).is_dir()
        },
        "programs": {name: shutil.which(name) for name in PROGRAMS},
        "environment": {name: os.environ[name] for name in TOLD if name in os.environ},
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _gpu() -> dict[str, Any]:
    if not shutil.which("nvidia-smi"):
        return {"error": "no nvidia-smi"}
    query = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, check=False)
    if asked.returncode:
        return {"error": f"nvidia-smi: {(asked.stdout + asked.stderr).strip()}"}
    line = asked.stdout.splitlines()[0]
    topology = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False
    )
    told = dict(zip(QUERY.split(","), map(str.strip, line.split(",")), strict=True))
    return {**told, "topology": topology.stdout.splitlines()}


def _cuda() -> dict[str, Any]:
    """The GPU as torch sees it: a part of the card (MIG) has less memory and fewer multiprocessors."""
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # no driver, one that is too old, no GPU that is visible
        return {"none": f"{error}".splitlines()[0], "built for CUDA": torch.version.cuda}
    seen = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {
        "name": seen.name,
        "capability": [seen.major, seen.minor],
        "multiprocessors": seen.multi_processor_count,
        "l2_mib": seen.L2_cache_size / MIB,
        "free_gib": round(free / GIB, 1),
        "total_gib": round(total / GIB, 1),
        "count": torch.cuda.device_count(),
        "built for CUDA": torch.version.cuda,
    }


def _copies() -> dict[str, float]:
    """GB/s of plain copies. Copies on the device count bytes read and written."""
    import torch

    if not torch.cuda.is_available():
        host = torch.empty(SMALL, dtype=torch.uint8)
        other = torch.empty_like(host)
        return {"host to host": _rate(lambda: other.copy_(host), SMALL, lambda: None)}
    device, other = (torch.empty(SIZE, dtype=torch.uint8, device="cuda") for _ in range(2))
    pageable = torch.empty(SIZE, dtype=torch.uint8)
    pinned = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    wait = torch.cuda.synchronize
    chunk = 16 * MIB

    def pieces() -> None:
        for start in range(0, SIZE, chunk):
            device[start : start + chunk].copy_(pinned[start : start + chunk], non_blocking=True)

    return {
        "device to device": 2 * _rate(lambda: other.copy_(device), SIZE, wait),
        "pinned to device": _rate(lambda: device.copy_(pinned, non_blocking=True), SIZE, wait),
        "device to pinned": _rate(lambda: pinned.copy_(device, non_blocking=True), SIZE, wait),
        "pinned to device, 16 MiB each": _rate(pieces, SIZE, wait),
        "pageable to device": _rate(lambda: device.copy_(pageable), SIZE, wait),
    }


def _rate(copy: Callable[[], object], nbytes: int, wait: Callable[[], object]) -> float:
    """The best of a few copies, in GB/s."""
    best = float("inf")
    for _ in range(5):
        wait()
        started = time.perf_counter()
        copy()
        wait()
        best = min(best, time.perf_counter() - started)
    return round(nbytes / best / 1e9, 2)


def _read_only() -> dict[str, Any]:
    """Whether memory that is mapped read-only, like a peer's slots, can be pinned."""
    import torch

    if not torch.cuda.is_available():
        return {"error": "no GPU"}
    runtime = torch.cuda.cudart()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(SMALL)
        mapped = mmap.mmap(file.fileno(), SMALL, mmap.MAP_SHARED, mmap.PROT_READ)
        address = _address(mapped)
        code = runtime.cudaHostRegister(address, SMALL, REGISTER_READ_ONLY)
        if int(code) == 0:
            runtime.cudaHostUnregister(address)
        return {"cudaHostRegister": int(code), "pinned": int(code) == 0}


PROBES: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
    *(("gpu", _gpu), ("cuda", _cuda), ("copies", _copies), ("read_only", _read_only)),
)


def _address(mapped: mmap.mmap) -> int:
    """The start address of a mapping. numpy takes read-only buffers, ctypes does not."""
    import numpy

    return int(numpy.frombuffer(mapped, numpy.uint8).ctypes.data_as(ctypes.c_void_p).value or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
