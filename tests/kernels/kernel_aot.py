# SPDX-License-Identifier: Apache-2.0
"""Compile kernels for sm_90a as they are launched, without a GPU, and say what became of them.

A program of its own, because in the process of the tests kernels are interpreted:
`python kernel_aot.py` prints JSON, a dict per kernel; with names, of these only.
"""

import collections
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton

from pd_bench.kernels.compiled import Assembly, compiled
from pd_bench.kernels.sample_launches import chunk
from pd_kernels.transfer import PayloadShape, Planes, Resharding, new_sums
from pd_kernels.transfer.chunk_launch import ChunkLaunch
from pd_kernels.transfer.gather import launch_gather
from pd_kernels.transfer.reshard import launch_reshard
from pd_kernels.transfer.scatter import launch_scatter
from pd_kernels.transfer.sums import launch_payload_sums


def report(kernel: Any) -> dict[str, Any]:
    """Registers, shared memory, local memory and the width of every access to global memory."""
    assembly = Assembly.of(kernel)
    sass = assembly.sass
    accesses = collections.Counter(re.findall(r"\b((?:LDG|STG|LDL|STL)\.[\w.]*)", sass))
    return {
        "registers": assembly.registers,
        "threads": assembly.threads,
        "stack": assembly.stack,
        "shared": assembly.shared,
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+\S", sass, re.M)),
        "accesses": dict(accesses),
        "flushes": len(re.findall(r"\.ftz\.", kernel.asm["ptx"])),
        "evict first": kernel.asm["ptx"].count("L2::evict_first"),
        "loads at once": loads_at_once(sass),
        "packed": {
            name: kernel.asm["ptx"].count(name)
            for name in ("max.u16x2", "cvt.rn.satfinite.e4m3x2.f32")
        },
    }


def loads_at_once(sass: str) -> int:
    """The most 16-byte loads that are under way before anything waits for one of them."""
    most, pending = 0, set[int]()
    count = 0
    for text in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.M):
        load = re.search(r"LDG\.E(?:\.EF)?\.128\S* R(\d+)", text)
        read = {int(register) for register in re.findall(r"\bR(\d+)\b", text)}
        if load:
            first = int(load[1])
            read -= {first}
        if read & pending:
            pending, count = set(), 0
        if load:
            pending |= set(range(first, first + 4))
            count += 1
            most = max(most, count)
    return most


def verbatim(check: bool = False) -> ChunkLaunch:
    rows = torch.zeros(8, 8, 16 * 512, dtype=torch.uint8)
    planes = Planes.of_rows([rows], 1)
    slot = torch.zeros(planes.nbytes(4), dtype=torch.uint8)
    sums = new_sums(len(slot), slot.device) if check else None
    return ChunkLaunch(planes, torch.arange(4, dtype=torch.int32), slot, 0, 4, sums)


def reshard() -> None:
    payload = PayloadShape("int8", 8, 2, 100, 128, 128, 2)
    slabs = [
        [torch.zeros(payload.nbytes(ranks), dtype=torch.uint8) for _ in range(ranks)]
        for ranks in (4, 2)
    ]
    launch_reshard(Resharding.of(*slabs, payload))


BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
MLA: dict[str, Any] = {"heads": 1, "dims": (576,)}
UNLIKE: dict[str, Any] = {"dims": (192, 128)}
KERNELS: dict[str, Callable[[], None]] = {
    "gather raw": lambda: launch_gather(chunk("raw", BF16, BF16, True)),
    "gather raw, sums": lambda: launch_gather(chunk("raw", BF16, BF16, True, True)),
    "gather raw, MLA": lambda: launch_gather(chunk("raw", BF16, BF16, True, **MLA)),
    "gather raw, odd rows": lambda: launch_gather(chunk("raw", BF16, BF16, True, odd=True)),
    "gather raw, 192 and 128": lambda: launch_gather(chunk("raw", BF16, BF16, True, **UNLIKE)),
    "gather verbatim": lambda: launch_gather(verbatim()),
    "gather verbatim, sums": lambda: launch_gather(verbatim(check=True)),
    "gather fp8": lambda: launch_gather(chunk("fp8_e4m3", BF16, BF16, True)),
    "gather fp8, sums": lambda: launch_gather(chunk("fp8_e4m3", BF16, BF16, True, True)),
    "gather fp8, MLA": lambda: launch_gather(chunk("fp8_e4m3", BF16, BF16, True, **MLA)),
    "gather fp8, scale given": lambda: launch_gather(chunk("fp8_e4m3", BF16, FP8, True)),
    "gather fp8, 192 and 128": lambda: launch_gather(chunk("fp8_e4m3", BF16, BF16, True, **UNLIKE)),
    "gather fp8, float16": lambda: launch_gather(chunk("fp8_e4m3", FP16, FP16, True, True)),
    "gather fp8, float32": lambda: launch_gather(chunk("fp8_e4m3", FP32, FP32, True, True)),
    "gather int8": lambda: launch_gather(chunk("int8", BF16, BF16, True)),
    "gather int8, sums": lambda: launch_gather(chunk("int8", BF16, BF16, True, True)),
    "gather int8, MLA": lambda: launch_gather(chunk("int8", BF16, BF16, True, **MLA)),
    "gather int8, 80": lambda: launch_gather(chunk("int8", BF16, BF16, True, True, dims=(80, 80))),
    "gather int8, float32": lambda: launch_gather(chunk("int8", FP32, FP32, True, True)),
    "scatter raw": lambda: launch_scatter(chunk("raw", BF16, BF16, False)),
    "scatter raw, sums": lambda: launch_scatter(chunk("raw", BF16, BF16, False, True)),
    "scatter fp8": lambda: launch_scatter(chunk("fp8_e4m3", BF16, BF16, False)),
    "scatter fp8, sums": lambda: launch_scatter(chunk("fp8_e4m3", BF16, BF16, False, True)),
    "scatter int8": lambda: launch_scatter(chunk("int8", BF16, BF16, False)),
    "scatter int8, sums": lambda: launch_scatter(chunk("int8", BF16, BF16, False, True)),
    "scatter int8, MLA": lambda: launch_scatter(chunk("int8", BF16, BF16, False, **MLA)),
    "scatter raw FP8 to bfloat16": lambda: launch_scatter(chunk("raw", FP8, BF16, False)),
    "scatter int8, 192 and 128": lambda: launch_scatter(chunk("int8", BF16, BF16, False, **UNLIKE)),
    "scatter raw to FP8": lambda: launch_scatter(chunk("raw", BF16, FP8, False)),
    "scatter int8 to FP8, sums": lambda: launch_scatter(chunk("int8", FP16, FP8, False, True)),
    "scatter raw, odd rows": lambda: launch_scatter(chunk("raw", BF16, BF16, False, odd=True)),
    "scatter int8, odd rows": lambda: launch_scatter(chunk("int8", BF16, BF16, False, odd=True)),
    "reshard": reshard,
    "payload sums": lambda: launch_payload_sums(
        torch.zeros(1 << 16, dtype=torch.uint8), new_sums(1 << 16, torch.device("cpu"))
    ),
}


def main() -> None:
    found = {}
    for name in sys.argv[1:] or KERNELS:
        found[name] = report(compiled(KERNELS[name])[0])
    json.dump({"triton": triton.__version__, "kernels": found}, sys.stdout)


if __name__ == "__main__":
    main()
