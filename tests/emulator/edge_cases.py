# SPDX-License-Identifier: Apache-2.0
"""Public functions on tensors of a GPU, with what engines rarely pass: infinite sinks and scores, NaN in one sequence,
missing and repeated rows, empty batches, lengths of a million. Results are held to attention in float64, which is written
out here and shares nothing with the references of pd_kernels."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton.language as tl
from torch_device import gpu
from transfer_cases import Case
from vllm_door import few_processors, problem_of

from pd_bench.kernels.decode_cases import coded_latents
from pd_kernels.attention import (
    MixedPlan,
    Mod,
    merge_partials,
    mixed_attention,
    mla_decode,
    paged_decode,
    plan_mla_decode,
    plan_paged_decode,
    sparse_mla_decode,
)

FP8 = torch.float8_e4m3fn
BOUND = 1e-2
Result = tuple[torch.Tensor, torch.Tensor]
"""`out`, and the natural log-sum-exp of the scores."""


def softmaxed(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None) -> Result:
    """Attention of some lines. `scores` `[lines, tokens]`, `values` `[lines, tokens, dim]`, `sinks` `[lines]`, float64."""
    own = torch.full((len(scores), 1), -torch.inf).double() if sinks is None else sinks[:, None]
    every = torch.cat((scores, own), 1)
    top = every.max(1, keepdim=True).values
    if (infinite := top[:, 0] == torch.inf).any():  # a sink of inf takes all
        every[infinite] = torch.where(every[infinite] == torch.inf, 0.0, -torch.inf).double()
    weights = (every - torch.where(top.isinf(), 0.0, top)).exp()
    total = weights.sum(1, keepdim=True)
    share = torch.where(total == 0, 0.0, weights / total)[:, :-1]
    seen = torch.where(share[..., None] > 0, values, 0.0)  # what weighs nothing may be NaN
    seen = torch.where(share[..., None].isnan(), torch.nan, seen)
    return (share[..., None] * seen).sum(1), torch.where(
        infinite, torch.inf, torch.where(top.isinf(), 0.0, top)[:, 0] + total[:, 0].log()
    )


class Paged(NamedTuple):
    """Arguments of `paged_decode`, in its order."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def paged_arguments(
    lengths: Sequence[int],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    queries: int = 1,
    page: int = 16,
    cache: torch.dtype = torch.bfloat16,
) -> Paged:
    pages = [-(-each // page) for each in lengths]
    ids = (torch.randperm(max(1, sum(pages))) + 1).int().split(pages) if sum(pages) else ()
    table = torch.full((len(lengths), max((1, *pages))), 1 << 30, dtype=torch.int32)
    for row, own in enumerate(ids):
        table[row, : len(own)] = own
    size = 1 + sum(pages), page, kv_heads, dim
    keys, values = (torch.randn(size).to(cache) for _ in range(2))
    q = torch.randn(len(lengths), queries, heads, dim).bfloat16()
    return Paged(q, keys, values, table, torch.tensor(lengths, dtype=torch.int32))


def paged_by_hand(
    given: Paged,
    hidden: Callable[[torch.Tensor], torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> Result:
    """Each query and head by itself. `hidden`: which tokens have a score of -inf."""
    q, keys, values, table, lengths = given
    batch, queries, heads, dim = q.shape
    page, group = keys.shape[1], heads // keys.shape[2]
    out = torch.zeros(batch, queries, heads, values.shape[3]).double()
    lse = torch.full(out.shape[:3], -torch.inf).double()
    for row, length in enumerate(lengths.tolist()):
        for query in range(queries):
            end = length - queries + query + 1
            begin = max(0, end - window) if window else 0
            place = torch.arange(begin, max(begin, end))
            where = table[row, place // page].long(), place % page
            k, v = (each[where].double().repeat_interleave(group, 1) for each in (keys, values))
            scores = torch.einsum("hd,thd->ht", q[row, query].double(), k) * dim**-0.5
            if hidden is not None:
                scores = scores.masked_fill(hidden(place), -torch.inf)
            own = None if sinks is None else sinks.double()
            out[row, query], lse[row, query] = softmaxed(scores, v.transpose(0, 1), own)
    return out, lse


def same(found: Result, wanted: Result) -> None:
    """Equal up to the rounding of bfloat16; NaN and infinity in the same places."""
    for name, a, b in zip(("out", "lse"), found, wanted, strict=True):
        a = a.cpu().double().reshape(b.shape)
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(a), kind(b)), f"{name}: {kind.__name__} elsewhere"
        a, b = (torch.where(b.isfinite(), each, 0.0) for each in (a, b))
        error = float((a - b).norm() / b.norm().clamp_min(1e-9))
        assert error <= BOUND, f"{name} differs by {error:.1e}"


def on_gpu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.to("cuda") for each in tensors]


def paged(
    lengths: Sequence[int],
    sinks: Sequence[float] | None = None,
    hide: int | None = None,
    window: int = 0,
    spoil: Callable[[Paged], None] | None = None,
    long_lengths: bool = False,
    **shape: Any,
) -> None:
    """`hide`: tokens before this one get a score of -inf. `spoil` writes into the arguments."""
    torch.manual_seed(5)
    given = paged_arguments(lengths, **shape)
    if spoil:
        spoil(given)
    own = None if sinks is None else torch.tensor(sinks)
    hidden = None if hide is None else (lambda place: place < hide)
    wanted = paged_by_hand(given, hidden, own, window)
    mod = None if hide is None else Mod.of(_hides, (hide,), _hides_reference)
    with gpu(), few_processors():
        tensors = on_gpu(given)
        if long_lengths:
            tensors[4] = tensors[4].long()
        asked = {"sinks": None if own is None else own.to("cuda"), "window": window}
        # A name, because a tensor of the device must not be freed while an exception is on its way.
        plans = None, plan_paged_decode(*tensors[:3], window=window).fill(tensors[4])
        for plan in plans:
            found = paged_decode(*tensors, **asked, score_mod=mod, return_lse=True, plan=plan)
            same(found, wanted)


def _hides(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return tl.where(kv_idx < args[0], float("-inf"), score)


def _hides_reference(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return torch.where(kv_idx < args[0], -torch.inf, score)


def _nan_query(given: Paged) -> None:
    given.q[1, 0, 2, 5] = torch.nan


def _nan_key(given: Paged) -> None:
    given.keys[given.table[1, 0].long(), 3, 1] = torch.nan


def _infinite_value(given: Paged) -> None:
    given.values[given.table[1, 0].long(), 3, 1, 7] = torch.inf


def _large_query(given: Paged) -> None:
    """Scores of thousands, some in a softmax of one token."""
    given.q[0] *= 3000.0


def million(window: int, kv_heads: int = 1) -> None:
    """A table that names the same pages again and again, up to a million tokens."""
    torch.manual_seed(6)
    tokens, repeated = 1 << 20, 1024
    given = paged_arguments([repeated], 2, kv_heads, 32, page=256)
    table = given.table.repeat(1, tokens // repeated)
    whole = given._replace(table=table, lengths=torch.tensor([tokens], dtype=torch.int32))
    # The same tokens as often as all others: their softmax is that of one round.
    wanted = paged_by_hand(whole if window else given, window=window)
    if not window:
        wanted = wanted[0], wanted[1] + torch.tensor(tokens / repeated).double().log()
    with gpu(), few_processors():
        found = paged_decode(*on_gpu(whole), window=window, return_lse=True)
        same(found, wanted)


def chosen(coded: bool, heads: int = 4, kv_scale: float = 1.0) -> None:
    """Selections with rows that are missing first, last, in between and all; named twice; none; behind the count."""
    torch.manual_seed(8)
    rows, top_k, none = 90, 70, -1
    slots = torch.randint(0, rows, (6, top_k), dtype=torch.int32)
    slots[0, :10], slots[1, -30:], slots[2, ::3] = none, none, none
    slots[3] = none
    slots[4, 1:40] = slots[4, 0]
    counts = torch.tensor([70, 70, 69, 70, 64, 0], dtype=torch.int32)
    slots[2, 69], slots[4, 64:], slots[5] = 1 << 30, 1 << 30, 1 << 30  # nobody reads these
    latents = torch.randn(rows, 576).bfloat16()
    cache = coded_latents(latents) if coded else latents
    if kv_scale != 1.0:
        cache = (latents / kv_scale).to(FP8)
    stored = _decoded(cache) if coded else cache.double() * kv_scale
    q = torch.randn(6, heads, 576).bfloat16()
    out, lse = torch.zeros(6, heads, 512).double(), torch.zeros(6, heads).double()
    for row, count in enumerate(counts.tolist()):
        own = slots[row, :count].long()
        kv = stored[own[own >= 0]]
        values = kv[None, :, :512].expand(heads, -1, -1)
        out[row], lse[row] = softmaxed(q[row].double() @ kv.T * 0.05, values, None)
    with gpu(), few_processors():
        told = on_gpu((q, cache, slots, counts))
        found = sparse_mla_decode(*told, scale=0.05, kv_scale=kv_scale, return_lse=True)
        same(found, (out, lse))


def _decoded(coded: torch.Tensor) -> torch.Tensor:
    """FlashMLA's layout, by its definition: codes, a scale of each 128, and the part with RoPE."""
    rows = []
    for row in coded:
        codes = row[:512].view(FP8).double().view(4, 128)
        scales = row[512:528].clone().view(torch.float32).double()
        rope = row[528:].clone().view(torch.bfloat16).double()
        rows.append(torch.cat(((codes * scales[:, None]).flatten(), rope)))
    return torch.stack(rows)


def _rows_by_hand(
    given: Paged, counts: Sequence[int], hide: int | None, sinks: torch.Tensor | None, window: int
) -> Result:
    """Each sequence by itself, with its own number of queries; `given.q` `[tokens, heads, dim]`."""
    found, first = [], 0
    for row, count in enumerate(counts):
        q = given.q[None, first : first + count]
        own = Paged(
            q, given.keys, given.values, given.table[row : row + 1], given.lengths[row : row + 1]
        )
        hidden = None if hide is None else (lambda place, row=row: place < hide * row)
        found.append(paged_by_hand(own, hidden, sinks, window))
        first += count
    return tuple(torch.cat([each[n][0] for each in found]) for n in range(2))  # type: ignore[return-value]


def ragged(
    lengths: Sequence[int],
    counts: Sequence[int],
    decodes: int = 0,
    sinks: Sequence[float] | None = None,
    hide: int | None = None,
    window: int = 0,
    strided: bool = False,
    **shape: Any,
) -> None:
    """Sequences with unlike numbers of queries, none included: `mixed_attention` if there are `decodes`, else a nested q. `hide`:
    tokens before this one times the sequence's number get a score of -inf. `strided`: queries and caches are views."""
    torch.manual_seed(9)
    given = paged_arguments(lengths, **shape)
    q = torch.randn(sum(counts), *given.q.shape[2:]).bfloat16()
    given = given._replace(q=q)
    own = None if sinks is None else torch.tensor(sinks)
    wanted = _rows_by_hand(given, counts, hide, own, window)
    mod = None if hide is None else Mod.of(_hides_by_row, (hide,), _hides_by_row_reference)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    with gpu(), few_processors():
        q, keys, values, table, at = on_gpu(given)
        if strided:  # heads first, and something between them
            q = torch.cat((q, q), 1)[:, : q.shape[1]]
            keys, values = (
                torch.cat((each, each), 3)
                .transpose(1, 2)
                .contiguous()
                .transpose(1, 2)[..., : each.shape[3]]
                for each in (keys, values)
            )
        asked = {"score_mod": mod, "sinks": None if own is None else own.to("cuda")}
        if decodes:
            plan = MixedPlan.of(q, keys, table, at, starts, decodes, window, values)
            found = mixed_attention(q, keys, values, plan, **asked)
            same((found, torch.zeros(1)), (wanted[0], torch.zeros(1).double()))
            return
        offsets = torch.tensor(starts).to("cuda")
        nested = torch.nested.nested_tensor_from_jagged(q, offsets, max_seqlen=max(counts))
        told = nested, keys, values, table, at
        out, lse = paged_decode(*told, **asked, window=window, return_lse=True)
        same((out.values(), lse.values()), wanted)


def _hides_by_row(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return tl.where(kv_idx < args[0] * b, float("-inf"), score)


def _hides_by_row_reference(score, b, h, q_idx, kv_idx, args):  # type: ignore[no-untyped-def]
    return torch.where(kv_idx < args[0] * b, -torch.inf, score)


def tree(
    page: int, heads: int, coded: bool = False, kv_scale: float = 1.0, drafts: int = 4
) -> None:
    """Drafts of two branches over latents; a sequence of the drafts alone."""
    torch.manual_seed(12)
    lengths = (70, drafts, 129)
    given = paged_arguments(lengths, 1, 1, 576, page=page)
    latents = given.keys[:, :, 0]
    cache = (latents / kv_scale).to(FP8) if kv_scale != 1.0 else latents
    if coded:
        cache = coded_latents(latents)
    stored = (
        _decoded(cache.flatten(0, 1)).view(latents.shape) if coded else cache.double() * kv_scale
    )
    parents = (0, 0, 0, 1, 2, 3, 3, 5)[:drafts]
    seen = torch.eye(drafts, dtype=torch.bool)
    for draft, parent in enumerate(parents[1:], 1):
        seen[draft] |= seen[parent]
    words = (seen * 2 ** torch.arange(drafts)).sum(1).int().repeat(len(lengths), 1)
    q = torch.randn(len(lengths), drafts, heads, 576).bfloat16()
    out = torch.zeros(len(lengths), drafts, heads, 512).double()
    lse = torch.zeros(out.shape[:3]).double()
    for row, length in enumerate(lengths):
        place = torch.arange(length)
        kv = stored[given.table[row, place // page].long(), place % page]
        for draft in range(drafts):
            own = kv[torch.cat((torch.ones(length - drafts).bool(), seen[draft]))]
            values = own[None, :, :512].expand(heads, -1, -1)
            out[row, draft], lse[row, draft] = softmaxed(
                q[row, draft].double() @ own.T * 0.05, values, None
            )
    with gpu(), few_processors():
        told = on_gpu((q, cache, given.table, given.lengths))
        asked = {"scale": 0.05, "kv_scale": kv_scale, "return_lse": True, "tree": words.to("cuda")}
        plan = plan_mla_decode(*told[:2]).fill(told[3])
        for each in (None, plan, plan):  # the last takes the launch that the one before has left
            same(mla_decode(*told, **asked, plan=each), (out, lse))


def merged() -> None:
    """Partials of shards of which some have a sink of inf, or none of the tokens."""
    torch.manual_seed(13)
    given = paged_arguments([70, 40, 0])
    sinks = torch.tensor([0.5, -INF, INF, 1e4])
    wanted = paged_by_hand(given, sinks=sinks)
    with gpu(), few_processors():
        q, keys, values, table, lengths = on_gpu(given)
        first, rest = lengths.clamp(max=32), (lengths - 32).clamp(min=0)
        told = {"causal": False, "return_partials": True}
        own = sinks.to("cuda")
        parts = [
            paged_decode(q, keys, values, table, first, sinks=own, **told),
            paged_decode(q, keys, values, table[:, 2:].contiguous(), rest, **told),
        ]
        same(merge_partials(*zip(*parts, strict=True)), wanted)


def nothing() -> None:
    """Batches of no sequence, and sequences of no token, also with sinks."""
    with gpu(), few_processors():
        for lengths in ([], [0, 0]):
            given = on_gpu(paged_arguments(lengths))
            out, lse = paged_decode(*given, return_lse=True)
            assert out.shape == given[0].shape
            assert not out.cpu().any()
            assert (lse.cpu() == -torch.inf).all()
        sinks = torch.tensor([0.0, 5.0, -torch.inf, torch.inf]).to("cuda")
        out, lse = paged_decode(*given, sinks=sinks, return_lse=True)
        assert not out.cpu().any()
        assert torch.equal(lse.cpu(), sinks.cpu().expand(2, 1, 4))
        q, cache = torch.randn(2, 4, 576).bfloat16(), torch.randn(2, 64, 576).bfloat16()
        empty = on_gpu((q, cache, torch.zeros(2, 1).int(), torch.zeros(2).int()))
        out, lse = mla_decode(*empty, scale=1.0, return_lse=True)
        assert not out.cpu().any()
        assert (lse.cpu() == -torch.inf).all()


def controls() -> None:
    """The reference sees a sink that is left out, a token too many or too few, a missing row that is read, and a row that
    counts once although it is named twice."""
    infinite = functools.partial(paged, [70, 40], [INF, 0.0, 0.0, 0.0])
    plain = functools.partial(paged, [70, 40], window=33)
    selected = functools.partial(chosen, coded=False)
    found = {}
    for told, case, name, change in (
        ("no sinks", infinite, "paged_decode", lambda given, asked: asked.update(sinks=None)),
        ("a window too wide", plain, "paged_decode", lambda given, asked: asked.update(window=34)),
        ("a token too few", plain, "paged_decode", lambda given, asked: _replace(given, 4, -1)),
        ("a missing row", selected, "sparse_mla_decode", lambda given, asked: _read_missing(given)),
        ("rows once", selected, "sparse_mla_decode", lambda given, asked: _read_once(given)),
    ):
        call = globals()[name]

        def changed(*given: Any, call: Any = call, change: Any = change, **asked: Any) -> Any:
            own = [*given]
            change(own, asked)
            return call(*own, **(asked | ({"plan": None} if call is paged_decode else {})))

        with mock.patch.dict(globals(), {name: changed}):
            found[told] = problem_of(case)
    unfound = [name for name, told in found.items() if not told]
    assert not unfound, f"not found: {', '.join(unfound)}"


def _replace(given: list[torch.Tensor], place: int, added: int) -> None:
    given[place] = given[place] + added


def _read_missing(given: list[torch.Tensor]) -> None:
    given[2] = given[2].clamp(min=0)


def _read_once(given: list[torch.Tensor]) -> None:
    slots = given[2].cpu()
    slots[4, 1:40] = -1
    given[2] = slots.to("cuda")


INF = float("inf")
EDGES: dict[str, Case] = {
    f"edges, {name}": case
    for name, case in {
        "sinks": functools.partial(paged, [150, 0, 3], [0.5, -INF, INF, 1e4], queries=2),
        "sinks, window, 12 heads, dim 112": functools.partial(
            paged, [90, 40], [INF, *[-INF] * 5, *[-2.0] * 6], window=33, heads=12, dim=112
        ),
        "sinks, fp8": functools.partial(paged, [70, 1], [-INF, INF, 3.0, -30.0], cache=FP8),
        "scores of -inf": functools.partial(paged, [300, 100, 140], hide=130),
        "scores of -inf, sinks, fp8": functools.partial(
            paged, [300, 100], [-INF, 2.0, INF, 0.0], hide=130, cache=FP8
        ),
        "NaN in a query": functools.partial(paged, [60, 40, 90], spoil=_nan_query),
        "NaN in a key": functools.partial(paged, [60, 40, 90], spoil=_nan_key),
        "NaN in a key, fp8": functools.partial(paged, [60, 40, 90], spoil=_nan_key, cache=FP8),
        "inf in a value": functools.partial(paged, [60, 40, 90], spoil=_infinite_value),
        "large scores": functools.partial(paged, [130, 40], spoil=_large_query),
        "large scores, fp8": functools.partial(paged, [130, 40], spoil=_large_query, cache=FP8),
        "lengths of 64 bits, 7 heads, dim 120": functools.partial(
            paged, [130, 40, 0], heads=7, kv_heads=1, dim=120, queries=3, long_lengths=True
        ),
        "dim 96, 5 heads of 5, page 1": functools.partial(
            paged, [70, 2], heads=5, kv_heads=5, dim=96, page=1
        ),
        "nothing": nothing,
        "ragged, none": functools.partial(ragged, [70, 33, 9, 0], [3, 0, 1, 0]),
        "ragged, none, sinks, fp8, page 1": functools.partial(
            ragged, [40, 33, 9], [0, 5, 2], sinks=[INF, -INF, 2.0, 0.0], page=1, cache=FP8
        ),
        "ragged, mod, window, strided": functools.partial(
            ragged, [90, 70, 40], [2, 0, 4], hide=20, window=33, strided=True, page=1056
        ),
        "mixed, none": functools.partial(ragged, [70, 33, 50, 9], [1, 0, 0, 9], 2),
        "mixed, mod, sinks, page 1": functools.partial(
            ragged, [40, 33, 70], [1, 33, 50], 1, [INF, -INF, 2.0, 0.0], 20, page=1
        ),
        "mixed, window, strided, page 1056, 7 heads": functools.partial(
            ragged,
            [70, 9, 90],
            [2, 1, 41],
            2,
            window=33,
            heads=7,
            kv_heads=1,
            page=1056,
            strided=True,
        ),
        "mixed, mod, fp8, 5 heads of 5, dim 80": functools.partial(
            ragged, [40, 33, 70], [1, 1, 40], 2, None, 9, heads=5, kv_heads=5, dim=80, cache=FP8
        ),
        "mixed, mod, 128 heads": functools.partial(
            ragged, [40, 20], [1, 3], 1, None, 15, heads=128, kv_heads=1, dim=32
        ),
        "tree, page 1": functools.partial(tree, 1, 5),
        "tree, page 1056, 40 heads": functools.partial(tree, 1056, 40),
        "tree, fp8, page 24": functools.partial(tree, 24, 6, coded=True),
        "tree, one scale, 8 drafts": functools.partial(tree, 64, 12, kv_scale=0.02, drafts=8),
        "tree, gluon": functools.partial(tree, 64, 24, drafts=7),
        "merge": merged,
        "chosen": functools.partial(chosen, coded=False),
        "chosen, fp8": functools.partial(chosen, coded=True),
        "chosen, one scale, 40 heads": functools.partial(
            chosen, coded=False, heads=40, kv_scale=0.02
        ),
        "controls": controls,
        "a million tokens, window": functools.partial(million, window=500),
        "a million tokens": functools.partial(million, window=0),
    }.items()
}
