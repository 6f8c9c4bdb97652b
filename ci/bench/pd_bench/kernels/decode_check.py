# SPDX-License-Identifier: Apache-2.0
"""The decode kernels on a GPU against their references in float32, on random batches."""

import itertools
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pd_bench.kernels import decode_cases
from pd_bench.kernels.decode_cases import FP8, Heads, latent_set, paged_set
from pd_bench.kernels.random_cases import Problems, problems
from pd_kernels.attention import (
    DecodePlan,
    MixedPlan,
    Mod,
    alibi,
    document,
    plan_mla_decode,
    soft_cap,
)
from pd_kernels.attention.merge import launch_merge, reference_merge
from pd_kernels.attention.mixed_kernel import launch_mixed
from pd_kernels.attention.mla import launch_mla
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.attention.paged_call import PagedCall
from pd_kernels.attention.paged_kernel import launch_paged
from pd_kernels.attention.reference import (
    decoded_latents,
    reference_mla_decode,
    reference_paged_decode,
)

BOUND = 5e-3
MERGE_BOUND = 1e-6
"""Relative error of merges in float32, against float64."""

LAUNCHES = 4
"""Launches of each case, with one plan. A race may appear in only one of them."""

LONGEST = 20_000
LONGEST_CHUNK = 400
"""Queries of a prefill chunk. The number is small, because the reference holds all their scores."""

KERNELS = ("paged_decode", "mla_decode", "merge_partials", "mixed_attention")
"""The kernels that are checked, by the names of what is measured."""

HEADS = (
    *(Heads(32, 8, 128), Heads(28, 4, 128), Heads(40, 8, 128), Heads(8, 1, 64), Heads(6, 6, 80)),
    *(Heads(8, 4, 256), Heads(64, 8, 128), Heads(16, 2, 512), Heads(64, 8, 64), Heads(64, 8, 192)),
)
NARROW_VALUES = {192: 128}
"""Elements of a value, where it has fewer than a key (MiMo-V2)."""


def check_decode(cases: int, seed: int, kernels: Collection[str] = KERNELS) -> Problems:
    """Check the decode kernels on random batches.

    Args:
        cases: random cases of all kernels. A third are of MLA; merges and mixed batches, which each
            launch several times, come on top.
        seed: seed of the random cases.
        kernels: the kernels to check; all by default.

    Returns:
        A line for each case that failed, by kernel.
    """
    latent, few = cases // 3, -(-cases // 10)
    shares = ((cases - latent, _paged), (latent, _latent), (few, _merge), (few, _mixed))
    checks = ((name, *share) for name, share in zip(KERNELS, shares, strict=True))
    return problems((each for each in checks if each[0] in kernels), seed)


def _lengths(chance: random.Random) -> list[int]:
    longest = chance.choice([100, 1_000, LONGEST])
    return [chance.choice([0, 1, chance.randint(1, longest)]) for _ in range(chance.randint(1, 12))]


def _mods(chance: random.Random, heads: int, lengths: list[int]) -> tuple[Mod | None, Mod | None]:
    device = decode_cases.DEVICE
    score = chance.choice([None, None, soft_cap(2.0), alibi(torch.rand(heads, device=device) / 50)])
    ids = torch.arange(max(1, *lengths), dtype=torch.int32, device=device) // 100
    mask = chance.choice([None, None, document(ids.repeat(len(lengths), 1))])
    return score, mask


def _paged(chance: random.Random) -> str:
    heads, lengths = chance.choice(HEADS), _lengths(chance)
    queries, page = chance.choice([1, 1, 2, 4, 8]), chance.choice([16, 32, 48, 64, 256])
    cache = chance.choice([torch.bfloat16, FP8])
    window = chance.choice([0, 0, 100, 4_096])
    arguments = paged_set(lengths, heads, page, cache, queries)
    arguments = arguments._replace(
        values=arguments.values[..., : NARROW_VALUES.get(heads.dim, heads.dim)]
    )
    scales = (heads.dim**-0.5, 1.0, 1.0) if cache != FP8 else (heads.dim**-0.5, 0.7, 1.3)
    batch = PagedCall(*arguments, *scales, True, window, *_mods(chance, heads.query, lengths))
    skip = chance.random() < 0.7
    if chance.random() < 0.3:
        batch = _jagged(chance, batch)
    if chance.random() < 0.3:
        sinks = torch.randn(heads.query, device=decode_cases.DEVICE) * 3
        batch = replace(batch, sinks=sinks)
    if cache == FP8 and chance.random() < 0.5:
        batch = replace(batch, head_scales=_head_scales(heads))
    shown = f"{heads} page {page} {cache} queries {queries} window {window} lengths {lengths}"
    shown += " jagged" * (batch.starts is not None) + " masked" * (batch.mask_mod is not None)
    shown += " sinks" * (batch.sinks is not None) + " scales by head" * bool(batch.head_scales)
    batch.check()
    batch.check_kernel()
    plan = (batch if skip else replace(batch, mask_mod=None)).plan()
    kernel = _Kernel(
        plan=plan,
        lengths=batch.lengths,
        shape=(*batch.query.shape[:3], batch.width),
        reference=lambda out, lse: reference_paged_decode(batch, out, lse),
        launch=lambda out, lse: launch_paged(batch, out, lse, plan.tensors),
    )
    wrong = _compare(kernel)
    return f"{shown}: {wrong}" if wrong else ""


def _head_scales(heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.rand(2, heads.kv, device=decode_cases.DEVICE) + 0.5
    return own[0], own[1]


def _jagged(chance: random.Random, batch: PagedCall) -> PagedCall:
    """The batch with fewer queries for some sequences."""
    most = batch.queries
    counts = [chance.randint(0, most) for _ in batch.query[1:]] + [most]
    starts = torch.tensor([0, *counts], device=decode_cases.DEVICE).cumsum(0)
    kept = [own[:count] for own, count in zip(batch.query, counts, strict=True)]
    query = torch.cat(kept).unsqueeze(1)
    return replace(batch, query=query, starts=starts, most_queries=most)


def _latent(chance: random.Random) -> str:
    lengths, heads = _lengths(chance), chance.choice([16, 24, 64, 128])
    queries, page = chance.choice([1, 2, 4]), chance.choice([16, 64])
    form = chance.choice(["bfloat16", "bfloat16", "coded", "coded", "one scale"])
    chosen = chance.random() < 0.25
    if chosen:
        queries, page = 1, 1
    given = latent_set(lengths, heads, queries, page, form == "coded")
    kv_scale = 1.0
    if form == "one scale":
        kv_scale = 0.02
        given = given._replace(cache=(given.cache / kv_scale).to(FP8))
    if chosen:
        given.table[:, ::5] = -1
    batch = MlaCall(*given, 0.05, not chosen, kv_scale)
    shown = f"heads {heads} page {page} queries {queries} {form} lengths {lengths}"
    shown += " chosen" * chosen
    wrong = check_latent(batch)
    return f"{shown}: {wrong}" if wrong else ""


def check_latent(batch: MlaCall) -> str:
    """Compare `mla_decode` of a batch with its reference, and return what differs."""
    batch.check()
    batch.check_kernel()
    plan = plan_mla_decode(batch.query, batch.cache)
    read = as_multiplied(batch)
    kernel = _Kernel(
        plan=plan,
        lengths=batch.lengths,
        shape=(*batch.query.shape[:3], 512),
        reference=lambda out, lse: reference_mla_decode(read, out, lse),
        launch=lambda out, lse: launch_mla(batch, out, lse, plan.tensors),
    )
    return _compare(kernel)


def as_multiplied(batch: MlaCall) -> MlaCall:
    """The batch with the latents that the kernel multiplies, for its reference.

    Rows of more than 32 lines decode FP8 to bfloat16 before the products. That rounding alone is
    an error of up to 7e-3, more than `BOUND`; it belongs to the kernel's definition.
    """
    if not batch.coded or batch.words:
        return batch
    return replace(batch, cache=decoded_latents(batch.cache).to(batch.query.dtype))


def _merge(chance: random.Random) -> str:
    """Merge 2 to 8 shards, one of them empty; one sequence is empty in all shards."""
    device, dim = decode_cases.DEVICE, chance.choice([64, 80, 128, 512])
    shape = chance.randint(1, 40), chance.choice([1, 8, 28])
    for shards in range(2, 9):
        outs = torch.randn(shards, *shape, dim, device=device)
        lses = torch.randn(shards, *shape, device=device) * chance.choice([1, 5, 50])
        empty = chance.randrange(shards)
        outs[empty], lses[empty] = torch.nan, -torch.inf
        outs[:, 0], lses[:, 0] = torch.nan, -torch.inf
        expected, sums = reference_merge(outs.double(), lses.double())
        out = torch.full((*shape, dim), 7.0, device=device)
        lse = launch_merge(outs, lses, out)
        error = float((out - expected).norm() / expected.norm().clamp_min(1e-30))
        shown = f"{shards} shards of {list(shape)} x {dim}, shard {empty} empty"
        if not error <= MERGE_BOUND:
            return f"{shown}: error {error:.2e}, at most {MERGE_BOUND}"
        if out[0].any() or not torch.allclose(lse.double(), sums, rtol=1e-6, atol=1e-6):
            return f"{shown}: lse, or what is empty, differs"
    return ""


def _mixed(chance: random.Random) -> str:
    """Prefill chunks and decodes in one launch, several times with one plan."""
    heads, cache = chance.choice(HEADS), chance.choice([torch.bfloat16, FP8])
    decodes, chunks = chance.randint(1, 12), chance.randint(1, 2)
    lengths = [chance.randint(1, LONGEST) for _ in range(decodes + chunks)]
    counts = [1] * decodes + [
        chance.randint(1, min(length, LONGEST_CHUNK)) for length in lengths[decodes:]
    ]
    starts = [0, *itertools.accumulate(counts)]
    given = paged_set(lengths, heads, chance.choice([16, 64]), cache)
    query = torch.randn(
        starts[-1], heads.query, heads.dim, dtype=torch.bfloat16, device=decode_cases.DEVICE
    )
    plan = MixedPlan.of(query, given.keys, given.table, given.lengths, starts, decodes)
    layer: dict[str, Any] = {
        "query": query.unsqueeze(1),
        "keys": given.keys,
        "values": given.values,
    }
    layer["scale"] = heads.dim**-0.5
    if cache == FP8 and chance.random() < 0.5:
        layer["head_scales"] = _head_scales(heads)
    expected = torch.zeros(layer["query"].shape, device=decode_cases.DEVICE)
    reference_paged_decode(plan.whole(**layer), expected, None)
    for _ in range(LAUNCHES):
        out = torch.full_like(query, 7.0)
        aware = decode_cases.DEVICE != "cpu"
        launch_mixed(*plan.calls(**layer), plan.plans, plan.tickets, out, None, sm_aware=aware)
        error = float((out.float() - expected[:, 0]).norm() / expected.norm().clamp_min(1e-30))
        if not error <= BOUND:
            return f"{heads} {cache} lengths {lengths} queries {counts}: error {error:.2e}"
        if plan.tickets.any():
            return f"{heads} {cache} lengths {lengths}: tickets are not zero after a launch"
    return ""


class _Kernel(NamedTuple):
    """A case: its plan, the lengths for kernel and reference, the shape of the result, the
    reference and the launch."""

    plan: DecodePlan
    lengths: torch.Tensor
    shape: tuple[int, ...]
    reference: Callable[[torch.Tensor, torch.Tensor], None]
    launch: Callable[[torch.Tensor, torch.Tensor], object]

    def allocate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate `out` and `lse`, filled with 7."""
        device = decode_cases.DEVICE
        out = torch.full(self.shape, 7.0, dtype=torch.bfloat16, device=device)
        return out, torch.full(self.shape[:3], 7.0, device=device)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.allocate()
        out = out.float()
        self.reference(out, lse)
        return out, lse


def _compare(kernel: _Kernel) -> str:
    kernel.plan.fill(kernel.lengths)
    expected = kernel.expected()
    for _ in range(LAUNCHES):
        actual = kernel.allocate()
        kernel.launch(*actual)
        if wrong := _differs(kernel, actual, expected):
            return wrong
    return _replayed(kernel)


def _replayed(kernel: _Kernel) -> str:
    """Capture one step and replay it with shorter lengths, as engines do with CUDA graphs."""
    actual = kernel.allocate()

    def step() -> None:
        kernel.plan.fill(kernel.lengths)
        kernel.launch(*actual)

    replay = captured(step)
    kernel.lengths.copy_(kernel.lengths // 2)
    expected = kernel.expected()
    for _ in range(2):
        for tensor in actual:
            tensor.fill_(7.0)
        replay()
        if wrong := _differs(kernel, actual, expected):
            return f"replayed with lengths {kernel.lengths.tolist()}: {wrong}"
    return ""


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step in a CUDA graph, and return its replay. On a CPU, which has no graphs, return
    the step."""
    if decode_cases.DEVICE == "cpu":
        return step
    torch.cuda.synchronize()  # the stream of a graph does not wait for other streams
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()

    return replay


def _differs(
    kernel: _Kernel,
    actual: tuple[torch.Tensor, torch.Tensor],
    expected: tuple[torch.Tensor, torch.Tensor],
) -> str:
    plan, (out, lse), (result, sums) = kernel.plan, actual, expected
    if not torch.equal(plan.ranges, plan.defined(kernel.lengths)):
        return "the plan differs from its definition"
    error = float((out.float() - result).norm() / result.norm().clamp_min(1e-30))
    if not error <= BOUND:
        return f"error {error:.2e}, at most {BOUND}"
    if not torch.allclose(lse, sums, atol=2e-3):
        return "lse differs"
    return "counters are not zero after a launch" if plan.counters.any() else ""
