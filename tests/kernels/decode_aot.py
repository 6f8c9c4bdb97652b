# SPDX-License-Identifier: Apache-2.0
"""Compile the decode kernels for sm_90a as they are launched, without a GPU, and say what became of
them.

A program of its own, as kernel_aot.py: `python decode_aot.py [--arch 90] [name or part of one ...]` prints JSON;
without a name, of KERNELS, not of MORE. With `--arch`, for that compute capability without its point. Arguments are specialised by Triton itself, for a driver that only
names its target.
"""

import argparse
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
from kernel_aot import report
from triton.backends.compiler import GPUTarget

from pd_bench.kernels.compiled import TARGET, Assembly, compiled
from pd_bench.kernels.sample_launches import Launched, mla_call, paged_call
from pd_bench.kernels.sass import instructions, product_loops
from pd_kernels.attention import paged_call as paged_call_module
from pd_kernels.attention import tile_mask
from pd_kernels.attention.decode_call import KernelConfig
from pd_kernels.attention.decode_plan import DecodePlan, launch_plan
from pd_kernels.attention.mixed import MixedPlan
from pd_kernels.attention.mixed_kernel import PROGRAMS, launch_mixed
from pd_kernels.attention.mods import Mod, alibi, document, soft_cap
from pd_kernels.attention.paged_call import COSTS
from pd_kernels.attention.tile_mask import TileMask, launch_tile_mask
from pd_kernels.attention.work_partition import RowShape

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = torch.device("cpu")
INSTRUCTIONS = {
    "wgmma": r"\b[HQ]GMMA",
    "mma": r"\bHMMA",
    "spills": r"\b(?:LDL|STL)\b",
}
ASYNCHRONOUS = r"\bLDGSTS\.E(?:\.\w+)*?(?:\.(64|128))?(?= )"
"""A load from global to shared memory that nobody waits for, and its width in bits; 32 if it says
none."""
WAIT = r"(?<!WARPGROUP\.)\bDEPBAR\.LE SB0, 0x([0-9a-f]+)"
"""Waits until at most this number of groups of asynchronous loads are under way."""


def counts(kernel: Any) -> dict[str, int]:
    """How many instructions of each kind the kernel has; and, of its loop over tiles, the bytes
    that a thread loads asynchronously in one turn and how many groups of loads are under way when
    it waits."""
    sass = Assembly.of(kernel).sass
    found = {name: len(re.findall(pattern, sass)) for name, pattern in INSTRUCTIONS.items()}
    loop = loop_over_tiles(sass)
    widths = [int(bits or 32) // 8 for bits in re.findall(ASYNCHRONOUS, loop)]
    ptx = kernel.asm["ptx"]
    return found | {
        "products": dict(Counter(re.findall(r"wgmma\.mma_async\S*?\.(m64n\d+k\d+)", ptx))),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        "product waits": sorted(map(int, re.findall(r"wgmma\.wait_group\S* (\d+)", ptx))),
        "product chain": product_chain(sass),
        "hardware waits": len(re.findall(r"WARPGROUP\.DEPBAR", sass)),
        "loop instructions": loop.count("\n"),
        "wide loop stores": len(re.findall(r"\bSTS\.128\b", loop)),
        "spills in the loop": len(re.findall(INSTRUCTIONS["spills"], loop)),
        "loop loads": sum(widths),
        "wide loop loads": sum(width for width in widths if width == 16),
        "groups a turn": loop.count("LDGDEPBAR"),
        "groups under way": min((int(most, 16) for most in re.findall(WAIT, loop)), default=0),
    }


def product_chain(sass: str) -> int:
    """The most products of a turn of the loop, each of which adds to the result of the one before
    and so waits for it; those of 16 lines only."""
    most = 0
    for turn in product_loops(instructions(sass)):
        chains: dict[str, int] = {}
        for each in turn:
            if each.opcode == "HMMA":
                result, _, _, added = (part.strip() for part in each.operands.split(","))
                chains[result] = chains.get(added, 0) + 1
                most = max(most, chains[result])
    return most


def loop_over_tiles(sass: str) -> str:
    """The instructions of the loop over tiles: the smallest loop with asynchronous loads and
    products; "" if there is none. A loop is everything from the target of a backward branch to the
    branch."""
    code = [
        (int(address, 16), text)
        for address, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)
    ]
    found = ""
    for end, text in code:
        target = re.search(r"\bBRA(?:\.\w+)* (?:\w+, )?0x([0-9a-f]+)", text)
        if target is None or int(target[1], 16) >= end:
            continue
        body = "\n".join(line for at, line in code if int(target[1], 16) <= at <= end)
        if "LDGSTS" in body and re.search("MMA", body) and (not found or len(body) < len(found)):
            found = body
    return found


def mixed_call(dtype: torch.dtype = BF16, **mods: Mod) -> Launched:
    cache = torch.zeros(4, 16, 8, 256).to(dtype)
    query, starts = torch.zeros(513, 32, 128, dtype=BF16), [0, 1, 513]
    table, lengths = torch.zeros(2, 64, dtype=torch.int32), torch.full((2,), 600)
    plan = MixedPlan.of(query, cache[..., :128], table, lengths, starts, 1)
    prefill, decode = plan.calls(keys=cache[..., :128], values=cache[..., 128:], **mods)
    told = plan.plans, plan.tickets, torch.zeros_like(query), None
    launch_mixed(prefill, decode, *told, owners=plan.owner)
    return Launched(prefill.config.tile * 2 * 128 * dtype.itemsize, PROGRAMS)


def starved_call() -> Launched:
    """A kernel with half the registers that it needs."""
    with mock.patch.object(KernelConfig, "registers", 80):
        return paged_call()


def unpipelined_call() -> Launched:
    """A kernel whose loop loads a tile and waits for it."""
    two = paged_call_module.config_of(128, 2, 16)._replace(stages=2)
    with mock.patch.object(paged_call_module, "config_of", return_value=two):
        return paged_call()


def plan_call() -> Launched:
    lengths = torch.ones(256, dtype=torch.int32)
    plan = DecodePlan.of(RowShape(8, 64, 1, 0), COSTS, 256, 264, 16, 64, DEVICE)
    launch_plan(plan, lengths)
    return Launched(0, 1)


def tile_mask_call() -> Launched:
    """The first of its two kernels, in which the mod is called."""
    lengths = torch.ones(2, dtype=torch.int32)
    mask = TileMask.of(document(IDS), RowShape(8, 64, 1, 0), 32, 2, 1024, DEVICE)
    with mock.patch.object(tile_mask, "list_tiles", mock.MagicMock()):
        launch_tile_mask(mask, lengths)
    return Launched(0, 1)


SLOPES, IDS = torch.zeros(32), torch.zeros(2, 1024, dtype=torch.int32)
KERNELS: dict[str, Callable[[], Launched]] = {
    "plan": plan_call,
    "paged": paged_call,
    "paged, fp8": functools.partial(paged_call, dtype=FP8),
    "paged, fp8, swapped": functools.partial(paged_call, dtype=FP8, swapped=True),
    "paged, 4 queries": functools.partial(paged_call, queries=4, heads=64),
    "paged, 8 queries": functools.partial(paged_call, queries=8, heads=64),
    "paged, page 64, window and mods": functools.partial(
        paged_call, page=64, window=4096, score=alibi(SLOPES), mask=document(IDS)
    ),
    "paged, listed tiles": functools.partial(paged_call, mask=document(IDS), listed=True),
    "paged, jagged": functools.partial(paged_call, queries=4, jagged=True),
    "tile mask": tile_mask_call,
    "mixed": mixed_call,
    "mixed, fp8": functools.partial(mixed_call, FP8),
    "mla, 16 heads": functools.partial(mla_call, 16),
    "mla, gluon": functools.partial(mla_call, 128, gluon=True),
    "mla, 16 heads, 4 queries": functools.partial(mla_call, 16, 4),
    "paged, few registers": starved_call,
    "paged, two stages": unpipelined_call,
    "mla, 128 heads": functools.partial(mla_call, 128),
    "mla, 128 heads, fp8": functools.partial(mla_call, 128, coded=True),
    "mla, 16 heads, fp8": functools.partial(mla_call, 16, coded=True),
    "paged, dim 80": functools.partial(paged_call, dim=80),
    "paged, dim 256, 8 queries, fp8": functools.partial(
        paged_call, dim=256, queries=8, heads=64, dtype=FP8, page=64
    ),
    "mla, 128 heads, page 16": functools.partial(mla_call, 128, page=16),
}
MORE: dict[str, Callable[[], Launched]] = {
    "paged, dim 512": functools.partial(paged_call, heads=16, kv_heads=2, dim=512),
    "paged, dim 512, 32 lines": functools.partial(
        paged_call, queries=4, heads=16, kv_heads=2, dim=512
    ),
    "paged, dim 512, 64 lines": functools.partial(
        paged_call, queries=8, heads=16, kv_heads=2, dim=512
    ),
    "paged, dim 512, fp8": functools.partial(paged_call, heads=16, kv_heads=2, dim=512, dtype=FP8),
    "paged, 192 and 128": functools.partial(paged_call, dim=192, value_dim=128),
    "paged, 192 and 128, fp8": functools.partial(paged_call, dim=192, value_dim=128, dtype=FP8),
    "paged, 192 and 128, 64 lines": functools.partial(
        paged_call, heads=64, queries=8, dim=192, value_dim=128
    ),
    "paged, 64 and 512": functools.partial(paged_call, dim=64, value_dim=512),
    "paged, sinks": functools.partial(paged_call, heads=64, dim=64, sinks=True, window=128),
    "paged, sinks, fp8": functools.partial(paged_call, heads=64, dim=64, sinks=True, dtype=FP8),
    "paged, fp8, by head": functools.partial(paged_call, dtype=FP8, by_head=True),
    "paged, fp8, swapped, by head": functools.partial(
        paged_call, dtype=FP8, swapped=True, by_head=True
    ),
    "paged, fp8, 8 queries, by head": functools.partial(
        paged_call, dtype=FP8, queries=8, heads=64, by_head=True
    ),
    "paged, dim 32": functools.partial(paged_call, dim=32),
    "paged, dim 120": functools.partial(paged_call, dim=120),
    "paged, dim 64": functools.partial(paged_call, dim=64),
    "paged, dim 256": functools.partial(paged_call, dim=256),
    "paged, fp8, swapped, 32 lines": functools.partial(
        paged_call, dtype=FP8, swapped=True, queries=4, heads=64
    ),
    "paged, fp8, swapped, page 64, window and mods": functools.partial(
        paged_call,
        dtype=FP8,
        swapped=True,
        page=64,
        window=4096,
        score=alibi(SLOPES),
        mask=document(IDS),
    ),
    "paged, page 256, soft cap": functools.partial(paged_call, page=256, score=soft_cap(30.0)),
    "mla, 128 heads, page 16, fp8": functools.partial(mla_call, 128, page=16, coded=True),
    "mla, 32 heads, page 16, fp8": functools.partial(mla_call, 32, page=16, coded=True),
    "mla, 16 heads, one scale": functools.partial(mla_call, 16, dtype=FP8),
    "mla, 32 heads, one scale": functools.partial(mla_call, 32, dtype=FP8),
    "mla, 128 heads, one scale": functools.partial(mla_call, 128, dtype=FP8),
    "mla, 128 heads, page 16, one scale": functools.partial(mla_call, 128, page=16, dtype=FP8),
    "mla, 16 heads, chosen, one scale": functools.partial(mla_call, 16, page=1, dtype=FP8),
    "mla, 16 heads, fp8, 2 queries": functools.partial(mla_call, 16, 2, coded=True),
    "mla, 16 heads, 8 queries": functools.partial(mla_call, 16, 8),
    "mla, 16 heads, 8 queries, fp8": functools.partial(mla_call, 16, 8, coded=True),
    "mla, 16 heads, 4 queries, tree": functools.partial(mla_call, 16, 4, tree=True),
    "mla, 128 heads, 4 queries, tree": functools.partial(mla_call, 128, 4, tree=True),
    "mla, 8 heads, 4 queries, tree, fp8": functools.partial(mla_call, 8, 4, coded=True, tree=True),
    "mla, 16 heads, 8 queries, tree, fp8": functools.partial(
        mla_call, 16, 8, coded=True, tree=True
    ),
    "mla, 8 heads, 4 queries, tree, one scale": functools.partial(
        mla_call, 8, 4, dtype=FP8, tree=True
    ),
    "mla, 16 heads, 8 queries, tree, one scale": functools.partial(
        mla_call, 16, 8, dtype=FP8, tree=True
    ),
    "mla, 128 heads, 4 queries, tree, fp8": functools.partial(
        mla_call, 128, 4, coded=True, tree=True
    ),
    "mla, gluon, 4 queries": functools.partial(mla_call, 32, 4, gluon=True),
    "mla, gluon, 4 queries, tree": functools.partial(mla_call, 32, 4, gluon=True, tree=True),
    "mixed, soft cap": functools.partial(mixed_call, score_mod=soft_cap(30.0)),
    "mixed, ALiBi, fp8": functools.partial(mixed_call, FP8, score_mod=alibi(SLOPES)),
    "mixed, ALiBi": functools.partial(mixed_call, score_mod=alibi(SLOPES)),
    "mixed, documents, fp8": functools.partial(mixed_call, FP8, mask_mod=document(IDS)),
    "mixed, documents": functools.partial(mixed_call, mask_mod=document(IDS)),
    "mla, chosen": functools.partial(mla_call, 16, page=1),
    "mla, chosen, fp8": functools.partial(mla_call, 16, page=1, coded=True),
    "mla, 128 heads, chosen, fp8": functools.partial(mla_call, 128, page=1, coded=True),
    "mla, 24 heads, page 16": functools.partial(mla_call, 24, page=16),
}
"""Like those, so that not every test run compiles them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=TARGET.arch)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    known = KERNELS | MORE
    wanted = [name for told in options.names for name in known if name == told] or [
        name for told in options.names for name in known if told in name
    ]
    for name in wanted or KERNELS:
        kernel, launched = compiled(known[name], GPUTarget("cuda", options.arch, 32))
        found[name] = {
            **report(kernel),
            **counts(kernel),
            "tile bytes": launched.tile,
            "programs": launched.programs,
        }
    json.dump({"triton": triton.__version__, "kernels": found}, sys.stdout)


if __name__ == "__main__":
    main()
