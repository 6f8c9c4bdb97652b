# SPDX-License-Identifier: Apache-2.0
"""Speed of the decode kernels beside a plain copy and the kernels that they replace."""

import functools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from pd_bench.kernels import decode_baselines, decode_cases, host, vllm_baselines
from pd_bench.kernels.decode_cases import (
    FP8,
    LENGTHS,
    MLA_CASES,
    Heads,
    LatentSet,
    PagedSet,
    latent_set,
    paged_set,
)
from pd_bench.kernels.decode_goals import geometric_means
from pd_bench.kernels.merging import measure_merging
from pd_bench.kernels.mixed import STEPS, measure_mixed
from pd_bench.kernels.report import Comparison, Param, duration, rows_or_failure, throughput
from pd_bench.kernels.timing import copies, copy_bandwidth, seconds
from pd_kernels.attention import (
    Mod,
    document,
    mla_decode,
    paged_decode,
    plan_mla_decode,
    plan_paged_decode,
)
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.tuning import tuned

BF16 = torch.bfloat16
REPLAYS = 100
SCALE = 192**-0.5
"""Factor of the scores of DeepSeek's heads, before absorption."""

BANDWIDTH_BAR = 0.80
FP8_BAR = 1 / 1.6
FLEX_BAR = 1 / 1.15
FLASHINFER_BARS = {True: 1 / 0.95, False: 1.0}
"""Bars for uniform lengths (True) and for others."""

MLA_BAR = 1.0
MANY_HEADS_BAR = 1 / 0.55

PAGED_BASELINES = {
    "FlashInfer": decode_baselines.flashinfer_calls,
    "XQA": decode_baselines.xqa_calls,
    "FA3": vllm_baselines.flash_attention_calls,
    "TRITON_ATTN": vllm_baselines.triton_attention_calls,
}
PAGES = (16, 64)
LLAMA = Heads(32, 8, 128)
HEADS = (LLAMA, Heads(64, 8, 128), Heads(28, 4, 128))
QUICK = ("uniform 64 x 4k", "lognormal", "ragged 4")
SHARDED = [131_072] * 8
"""Lengths of sequences that spread over several instances."""

DOCUMENTS = [8_192] * 64, 1_024
"""Lengths of sequences and of their documents. A query sees only the last document."""

Calls = list[Callable[[], Any]]


class Case(NamedTuple):
    """Rows that belong together and share their buffers."""

    name: str
    params: dict[str, Param]
    rows: Iterator[Comparison]  # measured on demand

    def matches(self, only: Sequence[str]) -> bool:
        """Whether the name or a parameter contains each of these texts, and none that has a `-`
        before it."""
        searched = "\n".join([self.name, *map(str, self.params.values())])
        return all((text.removeprefix("-") in searched) != text.startswith("-") for text in only)

    @property
    def kernel(self) -> str:
        return self.name.split()[0].rstrip(",")


def measure_decode(
    quick: bool, only: Sequence[str] = (), wrong: Collection[str] = ()
) -> Iterator[Comparison]:
    """Yield each row after its measurement. Print a line for each case, and for each absent
    baseline.

    Args:
        quick: fewer batches.
        only: texts that a case's name or parameters must contain.
        wrong: kernels that are not measured, because their check failed.
    """
    rows = []
    for row in _measured(quick, only, wrong):
        rows.append(row)
        yield row
    yield from geometric_means(rows, LENGTHS)


def _measured(quick: bool, only: Sequence[str], wrong: Collection[str]) -> Iterator[Comparison]:
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e9:,.0f} GB/s read and written", flush=True)
    for case in cases(quick, copy):
        if case.matches(only):
            print(f"{case.name}: {', '.join(map(str, case.params.values()))}", flush=True)
            yield from rows_or_failure(case.name, case.params, case.rows, case.kernel in wrong)
            torch.cuda.empty_cache()


def cases(quick: bool, copy: float) -> Iterator[Case]:
    """All cases in their order. A case is measured only when its rows are requested.

    Args:
        quick: fewer batches.
        copy: bytes per second, read and written, of a plain copy.
    """
    for heads in (LLAMA,) if quick else HEADS:
        for name in QUICK if quick else LENGTHS:
            lengths = LENGTHS[name](random.Random(1))
            params: dict[str, Param] = {"heads": str(heads), "lengths": name}
            for page in PAGES:
                shown = params | {"page": page}
                yield Case("paged_decode", shown, _paged(heads, shown, lengths, page, copy))
            if heads == LLAMA:  # torch compiles each batch again
                shown = params | {"page": decode_baselines.FLEX_PAGE}
                flex = _against_flex(heads, shown, lengths)
                yield Case("paged_decode / FlexAttention", shown, flex)
    shown = {"heads": str(LLAMA), "lengths": "64 x 8k, documents of 1k"}
    yield Case("paged_decode, mask_mod", shown, _masked(LLAMA, shown, *DOCUMENTS))
    for name in list(STEPS)[:1] if quick else STEPS:
        shown = {"heads": str(LLAMA), "lengths": name}
        rows = measure_mixed(LLAMA, shown, STEPS[name], seconds, REPLAYS)
        yield Case("mixed_attention", shown, rows)
    shown = {"heads": str(LLAMA), "lengths": "8 x 128k"}
    sets = functools.partial(_sets, SHARDED, LLAMA, PAGES[0], BF16)
    rows = measure_merging(LLAMA, shown, sets, paged_calls, seconds, REPLAYS)
    yield Case("merge_partials / paged_decode", shown, rows)
    layers = functools.partial(host.paged_layers, LLAMA)
    for name, make in (("K and V", layers), ("MLA", host.latent_layers)):
        shown = {"cache": name}
        yield Case(host.NAME, shown, host.measure_host(shown, make))
    for name in list(MLA_CASES)[:2] if quick else MLA_CASES:
        lengths, count, queries = MLA_CASES[name]
        for cache in ("bfloat16", "fp8"):
            shown = {"heads": count, "lengths": name, "page": 64, "cache": cache}
            yield Case("mla_decode", shown, _latent(shown, lengths, count, queries, copy))


def paged_calls(
    sets: Sequence[PagedSet], mask: Mod | None = None, skip: bool = True
) -> tuple[Calls, Callable[[], Any]]:
    """One call per set of buffers, all with one plan, like the layers of a model; and the function
    that fills the plan. With `skip`, tiles that a mask hides are not read."""
    plan = plan_paged_decode(
        sets[0].query,
        sets[0].keys,
        mask_mod=mask if skip else None,
        max_tokens=int(sets[0].lengths.max()),
    ).fill(sets[0].lengths)
    outs = [torch.empty_like(given.query) for given in sets]
    calls: Calls = [
        functools.partial(paged_decode, *given, out=out, plan=plan, mask_mod=mask)
        for given, out in zip(sets, outs, strict=True)
    ]
    return calls, lambda: plan.fill(sets[0].lengths)


def latent_calls(sets: Sequence[LatentSet]) -> tuple[Calls, Callable[[], Any]]:
    """The same as `paged_calls`, for MLA."""
    plan = plan_mla_decode(sets[0].query, sets[0].cache).fill(sets[0].lengths)
    calls: Calls = [functools.partial(mla_decode, *given, scale=SCALE, plan=plan) for given in sets]
    return calls, lambda: plan.fill(sets[0].lengths)


def _sets(lengths: list[int], heads: Heads, page: int, cache: torch.dtype) -> list[PagedSet]:
    read = sum(lengths) * heads.kv * 2 * heads.dim * cache.itemsize
    return [paged_set(lengths, heads, page, cache) for _ in range(copies(read))]


def _paged(
    heads: Heads, params: dict[str, Param], lengths: list[int], page: int, copy: float
) -> Iterator[Comparison]:
    large = len(lengths) >= 16 and min(lengths) >= 4_096
    took = {}
    for cache in (BF16, FP8):
        sets = _sets(lengths, heads, page, cache)
        calls, fill = paged_calls(sets)
        took[cache] = seconds(calls, REPLAYS)
        shown = params | {"cache": str(cache).removeprefix("torch.")}
        read = sum(lengths) * heads.kv * 2 * heads.dim * cache.itemsize
        bar = BANDWIDTH_BAR if large and cache == BF16 else None
        yield throughput("paged_decode", shown, read / took[cache] / 1e9, copy / 1e9, bar)
        if cache == BF16 and page == PAGES[0]:
            yield from _switched("column_merge", shown, functools.partial(paged_calls, sets))
            yield duration("planning / paged_decode", shown, seconds([fill]), took[cache], None)
        if cache == FP8 and page == PAGES[0]:
            yield from _switched("swapped", shown, functools.partial(paged_calls, sets))
        if page == PAGES[0]:
            yield from _against_others(shown, sets, took[cache])
        del sets, calls, fill
    yield duration("fp8 / bfloat16", params, took[FP8], took[BF16], FP8_BAR if large else None)


def _against_others(
    params: dict[str, Param], sets: list[PagedSet], ours_s: float
) -> Iterator[Comparison]:
    """Compare with baselines that take the same buffers. FlashInfer in bfloat16 has a bar."""
    kind = ", FP8" if sets[0].keys.dtype == FP8 else ""
    held = FLASHINFER_BARS[len(set(sets[0].lengths.tolist())) == 1]
    for name, make in PAGED_BASELINES.items():
        if theirs_s := _seconds(name + kind, make, sets):
            bar = held if name + kind == "FlashInfer" else None
            yield duration(f"paged_decode{kind} / {name}", params, ours_s, theirs_s, bar)


def _against_flex(
    heads: Heads, params: dict[str, Param], lengths: list[int]
) -> Iterator[Comparison]:
    sets = _sets(lengths, heads, decode_baselines.FLEX_PAGE, BF16)
    theirs_s = _seconds("FlexAttention", decode_baselines.flex_attention_calls, sets)
    if theirs_s:
        ours_s = seconds(paged_calls(sets)[0], REPLAYS)
        yield duration("paged_decode / FlexAttention", params, ours_s, theirs_s, FLEX_BAR)


def _masked(
    heads: Heads, params: dict[str, Param], lengths: list[int], document_tokens: int
) -> Iterator[Comparison]:
    """Compare a mask mod whose hidden tiles are skipped with one whose tiles are all read, and with
    FlexAttention's block mask."""
    sets = _sets(lengths, heads, decode_baselines.FLEX_PAGE, BF16)
    ids = torch.arange(max(lengths), dtype=torch.int32, device=decode_cases.DEVICE)
    ids = (ids // document_tokens).repeat(len(lengths), 1)
    calls, fill = paged_calls(sets, document(ids))
    ours_s = seconds(calls, REPLAYS)
    whole_s = seconds(paged_calls(sets, document(ids), skip=False)[0], REPLAYS)
    yield duration("mask_mod: tiles skipped / read", params, ours_s, whole_s, None)
    yield duration("planning / mask_mod", params, seconds([fill]), ours_s, None)
    flex = functools.partial(decode_baselines.flex_attention_calls, documents=ids)
    theirs_s = _seconds("FlexAttention", flex, sets)
    if theirs_s:
        yield duration("mask_mod / FlexAttention", params, ours_s, theirs_s, FLEX_BAR)


def _latent(
    params: dict[str, Param], lengths: list[int], heads: int, queries: int, copy: float
) -> Iterator[Comparison]:
    coded = params["cache"] == "fp8"
    read = sum(lengths) * (656 if coded else 2 * 576)
    sets = [latent_set(lengths, heads, queries, 64, coded) for _ in range(copies(read))]
    calls, fill = latent_calls(sets)
    ours_s = seconds(calls, REPLAYS)
    yield throughput("mla_decode", params, read / ours_s / 1e9, copy / 1e9, None)
    switches = {
        "column_merge": len(lengths) == 1,
        "gluon": MlaCall(*sets[0], SCALE, True).gluon,
    }
    for switch in (name for name, concerned in switches.items() if concerned):
        yield from _switched(switch, params, functools.partial(latent_calls, sets))
    if not coded:
        yield duration("planning / mla_decode", params, seconds([fill]), ours_s, None)
        theirs_s = _seconds("sgl-flash-mla", decode_baselines.flash_mla_calls, sets, SCALE)
        if theirs_s:
            bar = MLA_BAR if heads == 16 else MANY_HEADS_BAR
            yield duration("mla_decode / FlashMLA", params, ours_s, theirs_s, bar)


def _switched(
    switch: str, params: dict[str, Param], make: Callable[[], tuple[Calls, Any]]
) -> Iterator[Comparison]:
    """Compare both settings of an A/B switch (`Tuning`), one after the other."""
    with tuned(**{switch: True}):
        on_s = seconds(make()[0], REPLAYS)
    with tuned(**{switch: False}):
        off_s = seconds(make()[0], REPLAYS)
    yield duration(f"{switch}: on / off", params, on_s, off_s, None)


_absent: set[str] = set()


def _seconds(name: str, make: Callable[..., Calls], *arguments: object) -> float | None:
    """Time of a baseline's call; None if the baseline cannot run. Each cause is printed once."""
    try:
        return seconds(make(*arguments), REPLAYS)
    except Exception as error:  # a baseline that fails must not stop the rest
        cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if (line := f"not run: {name} ({cause})") not in _absent:
            _absent.add(line)
            print(line, flush=True)
        return None
