# SPDX-License-Identifier: Apache-2.0
"""The decode kernels on a GPU against their references in float32, on random batches."""

import random
from collections.abc import Callable

import torch

from pd_kernels.bench import decode_cases
from pd_kernels.bench.decode_cases import FP8, Heads, latent_set, paged_set
from pd_kernels.decode import (
    Mod,
    Plan,
    alibi,
    document,
    plan_mla_decode,
    plan_paged_decode,
    soft_cap,
)
from pd_kernels.decode.mla_batch import MlaBatch
from pd_kernels.decode.mla_kernel import launch_mla
from pd_kernels.decode.paged_batch import Batch
from pd_kernels.decode.paged_kernel import launch_paged
from pd_kernels.decode.reference import reference_mla_decode, reference_paged_decode
from pd_kernels.decode.schedule import schedule

BOUND = 5e-3
LAUNCHES = 4
"""Of each case, over one plan: a race may show in one of several."""

LONGEST = 20_000
HEADS = (
    *(Heads(32, 8, 128), Heads(28, 4, 128), Heads(40, 8, 128), Heads(8, 1, 64), Heads(6, 6, 80)),
    *(Heads(8, 4, 256), Heads(64, 8, 128)),
)


def check_decode(cases: int, seed: int) -> list[str]:
    """What went wrong, a line each; empty when all was right."""
    problems = []
    latent = cases // 3
    for name, count, check in (("paged", cases - latent, _paged), ("latent", latent, _latent)):
        for case in range(count):
            chance = random.Random(seed * 100_003 + case)
            torch.manual_seed(chance.randrange(1 << 30))
            if wrong := check(chance):
                problems.append(f"{name}, case {case} of seed {seed}: {wrong}")
    return problems


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
    scales = (heads.dim**-0.5, 1.0, 1.0) if cache != FP8 else (heads.dim**-0.5, 0.7, 1.3)
    batch = Batch(*arguments, *scales, True, window, *_mods(chance, heads.query, lengths))
    told = f"{heads} page {page} {cache} queries {queries} window {window} lengths {lengths}"
    batch.check()
    batch.check_kernel()
    plan = plan_paged_decode(batch.query, batch.keys, window=window)
    wrong = _compare(
        *(plan, batch.lengths, batch.query.shape),
        lambda out, lse: reference_paged_decode(batch, out, lse),
        lambda out, lse: launch_paged(batch, out, lse, plan.tensors),
    )
    return f"{told}: {wrong}" if wrong else ""


def _latent(chance: random.Random) -> str:
    lengths, heads = _lengths(chance), chance.choice([16, 24, 64, 128])
    queries, page = chance.choice([1, 2, 4]), chance.choice([16, 64])
    coded = chance.random() < 0.4
    batch = MlaBatch(*latent_set(lengths, heads, queries, page, coded), 0.05, True)
    told = f"heads {heads} page {page} queries {queries} coded {coded} lengths {lengths}"
    batch.check()
    batch.check_kernel()
    plan = plan_mla_decode(batch.query, batch.cache)
    wrong = _compare(
        *(plan, batch.lengths, (*batch.query.shape[:3], 512)),
        lambda out, lse: reference_mla_decode(batch, out, lse),
        lambda out, lse: launch_mla(batch, out, lse, plan.tensors),
    )
    return f"{told}: {wrong}" if wrong else ""


def _compare(
    plan: Plan,
    lengths: torch.Tensor,
    shape: tuple[int, ...],
    reference: Callable[[torch.Tensor, torch.Tensor], None],
    launch: Callable[[torch.Tensor, torch.Tensor], None],
) -> str:
    device = decode_cases.DEVICE
    plan.fill(lengths)
    if not torch.equal(plan.records, schedule(lengths, plan.rows, plan.workers, plan.costs)):
        return "the plan differs from its definition"
    wanted, sums = torch.empty(shape, device=device), torch.empty(shape[:3], device=device)
    reference(wanted, sums)
    for _ in range(LAUNCHES):
        out = torch.full(shape, 7.0, dtype=torch.bfloat16, device=device)
        lse = torch.full(shape[:3], 7.0, device=device)
        launch(out, lse)
        error = float((out.float() - wanted).norm() / wanted.norm().clamp_min(1e-30))
        if not error <= BOUND:
            return f"error {error:.2e}, at most {BOUND}"
        if not torch.allclose(lse, sums, atol=2e-3):
            return "lse differs"
        if plan.counters.any():
            return "counters are not zero after a launch"
    return ""
