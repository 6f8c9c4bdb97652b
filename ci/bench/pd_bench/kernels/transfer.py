# SPDX-License-Identifier: Apache-2.0
"""Speed of gather, scatter and reshard beside a plain copy and torch."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from pd_bench.kernels.caches import LLAMA_8B, MODELS, PAGED, RESHARD, CacheViews, Model, make_cache
from pd_bench.kernels.report import Comparison, Param, duration, rows_or_failure, throughput
from pd_bench.kernels.timing import copies, copy_bandwidth, seconds
from pd_bench.kernels.transfer_baselines import torch_gather, torch_reshard
from pd_kernels.transfer import (
    PayloadShape,
    Planes,
    Resharding,
    Stored,
    gather_pages,
    new_sums,
    reshard,
    scatter_pages,
)

BAR = 0.80
FUSED_BAR = 1.00
"""The bar for a codec's bytes per second, read and written, over `raw`'s with the same pages."""
RESHARD_BAR = 0.75
TORCH_BAR = 0.50
BF16 = torch.bfloat16
DEVICE = "cuda"
TOKENS = (512, 7_500, 32_000)
RANKS = (1, 2, 4, 8)
LAYOUTS = ((16, "LBHNC"), (64, "LBHNC"), (128, "LBHNC"), (16, "LBNHC"))


def measure_transfer(quick: bool, wrong: Collection[str] = ()) -> Iterator[Comparison]:
    """Yield each row after its measurement, and print a line of progress for each model and token
    count.

    Args:
        quick: only the first model in its first layouts, without 32,000 tokens and reshards.
        wrong: what is not measured, because its check failed.
    """
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e9:,.0f} GB/s read and written", flush=True)
    models, counts = (MODELS[:1], TOKENS[:2]) if quick else (MODELS, TOKENS)
    for model, tokens in itertools.product(models, counts):
        print(f"{model.name}, {tokens:,} tokens", flush=True)
        for page_size, order in LAYOUTS[:2] if quick else LAYOUTS:
            shown: dict[str, Param] = {"model": model.name, "tokens": tokens, "page": page_size}
            rows = _paged(model, tokens, page_size, order, copy)
            yield from rows_or_failure(PAGED, shown | {"layout": order}, rows, PAGED in wrong)
            torch.cuda.empty_cache()
    for ranks in () if quick else itertools.product(RANKS, RANKS):
        shown = {"model": LLAMA_8B.name, "tokens": 7_500, "ranks": f"{ranks[0]} to {ranks[1]}"}
        rows = _reshard(shown, LLAMA_8B, ranks, copy)
        yield from rows_or_failure(RESHARD, shown, rows, RESHARD in wrong)


def _paged(
    model: Model, tokens: int, page_size: int, order: str, copy: float
) -> Iterator[Comparison]:
    pages = -(-tokens // page_size)
    raw_bytes = model.bytes_of(tokens, 2)
    sets = copies(2 * raw_bytes)
    caches = [make_cache(model, pages + 8, page_size, order, BF16, DEVICE) for _ in range(sets)]
    tables = [torch.randperm(pages + 8, device=DEVICE)[:pages].int() for _ in range(sets)]
    raw: dict[str, Comparison] = {}  # by direction
    for codec in ("raw", "fp8_e4m3", "int8"):
        stored = Stored(BF16)
        planes = [Planes.of(c.keys, c.values, page_size, codec, stored, stored) for c in caches]
        nbytes = planes[0].nbytes(tokens)
        slots = [torch.empty(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(sets)]
        sums = [new_sums(nbytes, torch.device(DEVICE)) for _ in range(sets)]
        params: Mapping[str, Param] = {
            "model": model.name,
            "tokens": tokens,
            "page": page_size,
            "order": order,
            "codec": codec,
        }
        moved = raw_bytes + nbytes
        args = list(zip(planes, tables, slots, strict=True))
        ours_s = seconds([_call(gather_pages, *each, 0, tokens) for each in args])
        yield from _rates("gather", params, moved / ours_s, copy, raw)
        checked_s = seconds(
            [_call(gather_pages, *each, 0, tokens, s) for each, s in zip(args, sums, strict=True)]
        )
        yield duration("gather with sums / without", params, checked_s, ours_s, None)
        scatter_s = seconds([_call(scatter_pages, *each, 0, tokens) for each in args])
        yield from _rates("scatter", params, moved / scatter_s, copy, raw)
        del slots, sums, args
        theirs_s = _torch_seconds(model, caches[:2], tables[:2], tokens, codec)
        yield duration("gather / torch", params, ours_s, theirs_s, TORCH_BAR)


def _torch_seconds(
    model: Model, caches: list[CacheViews], tables: list[torch.Tensor], tokens: int, codec: str
) -> float:
    dtype = {"raw": BF16, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}[codec]
    dims = [model.key_dim] * model.layers + [model.value_dim] * len(caches[0].values)
    outputs = [torch.empty(model.heads, tokens, dim, dtype=dtype, device=DEVICE) for dim in dims]
    return seconds(
        [
            _call(torch_gather, cache, table, tokens, codec, outputs)
            for cache, table in zip(caches, tables, strict=True)
        ]
    )


def _reshard(
    params: Mapping[str, Param], model: Model, ranks: tuple[int, int], copy: float
) -> Iterator[Comparison]:
    tokens = int(params["tokens"])
    payload = PayloadShape(
        "raw", model.heads, model.layers, tokens, model.key_dim, model.value_dim, BF16.itemsize
    )
    sources, destinations = (
        [
            torch.randint(0, 256, (payload.nbytes(count),), dtype=torch.uint8, device=DEVICE)
            for _ in range(count)
        ]
        for count in ranks
    )
    ours_s = seconds([_call(reshard, Resharding.of(sources, destinations, payload))])
    shape = model.layers * len(payload.dims), model.heads, payload.code_bytes(0)
    theirs_s = seconds([_call(torch_reshard, sources, destinations, shape)])
    shown = {**params, "torch_us": round(theirs_s * 1e6)}
    moved = 2 * model.bytes_of(tokens, 2)
    yield throughput("reshard", shown, moved / ours_s / 1e9, copy / 1e9, RESHARD_BAR)


def _rates(
    name: str, params: Mapping[str, Param], rate: float, copy: float, raw: dict[str, Comparison]
) -> Iterator[Comparison]:
    """Yield bytes per second, compared with a copy; for a codec also compared with `raw`. Only
    `raw` has a bar against the copy.

    Args:
        raw: rows of `raw` by name; measured rows are added.
    """
    fused = params["codec"] != "raw"
    row = throughput(name, params, rate / 1e9, copy / 1e9, None if fused else BAR)
    yield row
    if fused:
        yield throughput(f"{name} / raw", params, row.ours, raw[name].ours, FUSED_BAR)
    else:
        raw[name] = row


def _call(function: Callable[..., None], *args: object) -> Callable[[], None]:
    return lambda: function(*args)
