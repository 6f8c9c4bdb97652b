# SPDX-License-Identifier: Apache-2.0
"""Calls of the public functions with everything at once, drawn by a seed: head sizes, groups, pages, layouts, dtypes, windows,
sinks, masks, drafts, lengths around pages. Unused memory is NaN, and unused entries of tables name no page.

The reference is float64 in numpy, one query and head after another, and shares nothing with those of pd_kernels. A call may also
be refused, by a ValueError that names what is not supported.
"""

import functools
import random
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch_device import gpu
from transfer_cases import Case
from vllm_door import few_processors, problem_of

from pd_bench.kernels.decode_cases import coded_latents
from pd_kernels.attention import (
    MixedPlan,
    alibi,
    document,
    mixed_attention,
    mla_decode,
    paged_decode,
    plan_mla_decode,
    plan_paged_decode,
    soft_cap,
    sparse_mla_decode,
)

FP8 = torch.float8_e4m3fn
NO_PAGE = 1 << 30
SCALE, ASKED = 0.1, 0.1
"""The factor of the scores, and the one that calls are given."""

DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256, 512)
PAGES = (1, 2, 3, 8, 16, 24, 48, 64, 100, 128, 256, 784, 1056)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 64, 128)
SINKS = (float("inf"), -float("inf"), float("nan"), 0.0, 3.0, -40.0, 1e4)


def softmax(scores: np.ndarray, values: np.ndarray, sink: float | None) -> tuple[np.ndarray, float]:
    """The result of a query and head, and the natural log-sum-exp. `scores` `[tokens]`, `values` `[tokens, dim]`."""
    if not len(scores):  # nothing is seen: the result is 0 whatever the sink is
        return np.zeros(values.shape[1]), -np.inf if sink is None else sink
    every = scores if sink is None else np.append(scores, sink)
    if np.isnan(every).any():
        return np.full(values.shape[1], np.nan), np.nan
    top = every.max(initial=-np.inf)
    if np.isinf(top):
        return np.zeros(values.shape[1]), top  # nothing is seen, or a sink takes all
    weights = np.exp(every - top)
    return weights[: len(scores)] @ values / weights.sum(), top + np.log(weights.sum())


def table_of(chance: random.Random, counts: list[int], wide: bool) -> tuple[torch.Tensor, int]:
    """A table of pages in any order, and how many pages there are. `wide`: rows are apart."""
    total = sum(counts)
    ids = list(range(1, total + 2))
    chance.shuffle(ids)
    room = torch.full((len(counts), max(1, *counts) + 3 * wide), NO_PAGE, dtype=torch.int32)
    for row, count in enumerate(counts):
        room[row, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
    return room[:, : max(1, *counts)], total + 2


def lengths_of(chance: random.Random, page: int, least: int) -> list[int]:
    around = (0, 1, page - 1, page, page + 1, 2 * page, 31, 32, 33, 63, 64, 65, 127, 128, 129)
    known = [each for each in around if each <= 300] + [chance.randint(1, 300) for _ in range(4)]
    return [max(least, chance.choice(known)) for _ in range(chance.randint(1, 4))]


def strided(chance: random.Random, rows: torch.Tensor) -> torch.Tensor:
    """The same values, `[page, token, head, dim]`, in another order of memory, with gaps, or not aligned."""
    order = chance.choice(((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1)))
    gap = chance.choice((0, 0, 16, 8, 1))
    sizes = [rows.shape[each] for each in order]
    room = torch.full((*sizes, rows.shape[3] + gap), float("nan")).to(rows.dtype)
    view = room.permute(*(order.index(each) for each in range(3)), 3)
    view = view[..., chance.choice((0, gap)) :][..., : rows.shape[3]]
    view.copy_(rows)
    return view


class Paged:
    """Arguments of `paged_decode`, drawn, and the wanted results."""

    def __init__(self, chance: random.Random, mixed: bool = False) -> None:
        self.mixed, self.dim = mixed, chance.choice(DIMS)
        self.value_dim = chance.choice(DIMS) if chance.random() < 0.25 else self.dim
        self.group = chance.choice([each for each in GROUPS if each * self.dim <= 8_192])
        self.kv_heads = chance.choice((1, 2, 3) if self.group * self.dim <= 2_048 else (1,))
        self.heads = self.group * self.kv_heads
        self.queries = 1 if mixed else chance.choice((1, 1, 2, 3, 5, 8))
        self.page = chance.choice(PAGES)
        self.dtype = chance.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        self.stored = chance.choice((self.dtype, FP8))
        self.window = chance.choice((0, 0, 1, 2, 17, 64, 1_000))
        self.causal = mixed or chance.random() < 0.8
        self.lengths = lengths_of(chance, self.page, 0)
        if mixed:
            self.lengths += [chance.randint(1, 150)]
        counts = [-(-each // self.page) for each in self.lengths]
        self.table, pages = table_of(chance, counts, chance.random() < 0.5)
        draw = torch.Generator().manual_seed(chance.randrange(1 << 30))
        size = pages, self.page, self.kv_heads
        caches = []
        for dim in (self.dim, self.value_dim):
            whole = torch.randn(*size, dim, generator=draw)
            used = torch.zeros(pages, dtype=torch.bool)
            for row, count in enumerate(counts):
                used[self.table[row, :count].long()] = True
            whole[~used] = float("nan")
            for row, length in enumerate(self.lengths):  # what no sequence has is NaN
                if tail := length % self.page:
                    whole[self.table[row, length // self.page].long(), tail:] = float("nan")
            whole = whole.to(self.dtype).to(self.stored)
            caches.append(strided(chance, whole))
        self.keys, self.values = caches
        self.counts = [self.queries] * len(self.lengths)
        self.decodes = 0
        if mixed:
            self.decodes = chance.randint(1, len(self.lengths) - 1)
            self.counts = [
                chance.randint(0, 8) if row < self.decodes else chance.randint(0, max(1, length))
                for row, length in enumerate(self.lengths)
            ]
            self.counts[0], self.counts[-1] = max(1, self.counts[0]), max(1, self.counts[-1])
        tokens = sum(self.counts)
        wide = torch.randn(tokens, self.heads, self.dim + 16, generator=draw).to(self.dtype)
        self.q = wide[..., : self.dim]
        if chance.random() < 0.5:
            self.q = self.q.contiguous()
        self.sinks: list[float] | None = None
        if chance.random() < 0.5:
            self.sinks = [chance.choice(SINKS) for _ in range(self.heads)]
        self.scales: tuple[Any, Any] = 1.0, 1.0
        if self.stored == FP8:
            self.scales = chance.choice(((1.0, 1.0), (0.5, 3.0), "heads"))  # type: ignore[assignment]
            if self.scales == "heads":
                drawn = (0.25 + torch.rand(2, self.kv_heads, generator=draw)).unbind()
                self.scales = drawn[0].clone(), drawn[1].clone()
        self.score = chance.choice((None, None, "soft cap", "alibi"))
        self.mask = chance.choice((None, None, "document"))
        self.listed = chance.random() < 0.5
        self.slopes = torch.rand(self.heads, generator=draw)
        longest = max((1, *self.lengths))
        self.ids = (
            torch.randint(0, 3, (len(self.lengths), longest), generator=draw).sort(1)[0].int()
        )
        self.long = chance.random() < 0.5
        self.planned = chance.choice((False, True, True))

    def __str__(self) -> str:
        names = ("heads", "kv_heads", "dim", "value_dim", "queries", "page", "dtype", "stored")
        names += ("window", "causal", "lengths", "counts", "decodes", "score", "mask", "listed")
        told = [f"{name}={getattr(self, name)}" for name in names]
        told += [f"sinks={self.sinks and self.sinks[:4]}", f"scales={self.scales}"]
        return ", ".join([*told, f"K {self.keys.stride()}, V {self.values.stride()}"])

    def wanted(self) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((len(self.q), self.heads, self.value_dim))
        lse = np.full(out.shape[:2], -np.inf)
        q = self.q.double().numpy()
        first = 0
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            place = np.arange(length)
            pages = self.table[row].long().numpy()[place // self.page]
            inside = torch.from_numpy(place % self.page)
            keys, values = (
                cache[torch.from_numpy(pages), inside].double().numpy()
                for cache in (self.keys, self.values)
            )
            for query in range(count):
                for head in range(self.heads):
                    out[first + query, head], lse[first + query, head] = self._line(
                        q[first + query, head], keys, values, row, length - count + query, head
                    )
            first += count
        return out, lse

    def _line(
        self, q: np.ndarray, keys: np.ndarray, values: np.ndarray, row: int, own: int, head: int
    ) -> tuple[np.ndarray, float]:
        """`own`: the place of the query's token in its sequence."""
        kv_head = head // self.group
        token = np.arange(len(keys))
        seen = np.ones(len(keys), dtype=bool)
        if self.causal:
            seen &= token <= own
        if self.window:
            seen &= token > own - self.window
        at = max(
            0, own
        )  # a query before the first token sees what follows, if causality does not hide it
        if self.mask and len(keys):
            ids = self.ids[row].numpy()
            seen &= ids[token] == ids[at]
        k_scale, v_scale = (
            float(each[kv_head]) if isinstance(each, torch.Tensor) else each for each in self.scales
        )
        scores = keys[seen, kv_head] @ q * SCALE * k_scale
        if self.score == "soft cap":
            scores = 5 * np.tanh(scores / 5)
        if self.score == "alibi":
            scores = scores + float(self.slopes[head]) * (token[seen] - at)
        sink = None if self.sinks is None else self.sinks[head]
        return softmax(scores, values[seen, kv_head] * v_scale, sink)

    def found(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each call twice: a second one with a plan takes the launch that the first has left."""
        q, keys, values, table = (
            _moved(each) for each in (self.q, self.keys, self.values, self.table)
        )
        lengths = torch.tensor(self.lengths, dtype=torch.int64 if self.long else torch.int32).to(
            "cuda"
        )
        mods: dict[str, Any] = {"score_mod": None, "mask_mod": None}
        if self.score:
            mods["score_mod"] = (
                soft_cap(5.0) if self.score == "soft cap" else alibi(self.slopes.to("cuda"))
            )
        if self.mask:
            mods["mask_mod"] = document(self.ids.to("cuda"))
        k_scale, v_scale = (
            each.to("cuda") if isinstance(each, torch.Tensor) else each for each in self.scales
        )
        sinks = None if self.sinks is None else torch.tensor(self.sinks).to("cuda")
        asked = {**mods, "scale": ASKED, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
        if self.mixed:
            starts = [0, *np.cumsum(self.counts).tolist()]
            plan = MixedPlan.of(q, keys, table, lengths, starts, self.decodes, self.window, values)
            return [(mixed_attention(q, keys, values, plan, **asked).cpu(), None)]
        grouped = q.unflatten(0, (-1, self.queries)) if self.queries > 1 else q
        told = grouped, keys, values, table, lengths
        asked |= {"causal": self.causal, "window": self.window, "return_lse": True}
        plan = None
        if self.planned:
            listed = (
                {"mask_mod": mods["mask_mod"], "max_tokens": self.ids.shape[1]}
                if self.mask and self.listed
                else {}
            )
            plan = plan_paged_decode(
                grouped, keys, values, window=self.window, max_batch=len(self.lengths) + 3, **listed
            ).fill(lengths)
        results = [paged_decode(*told, **asked, plan=plan) for _ in range(2)]
        return [(out.cpu().flatten(0, -3), lse.cpu().flatten(0, -2)) for out, lse in results]


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device, with its strides and all that lies between its elements."""
    whole = tensor.as_strided(
        (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), storage_offset=0
    )
    return whole.to("cuda").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Latent:
    """Arguments of `mla_decode` or `sparse_mla_decode`, drawn, and the wanted results."""

    def __init__(self, chance: random.Random, chosen: bool = False) -> None:
        self.chosen = chosen
        self.heads = chance.choice((1, 2, 5, 8, 16, 20, 24, 40, 64, 128))
        most = 8 if self.heads <= 16 else 2
        self.queries = (
            1 if chosen else chance.choice([each for each in (1, 2, 3, 5, 8) if each <= most])
        )
        self.dtype = chance.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        self.form = chance.choice(("plain", "coded", "one scale"))
        if self.form == "coded":
            self.dtype = torch.bfloat16
        self.kv_scale = 0.02 if self.form == "one scale" else 1.0
        self.page = 1 if chosen else chance.choice(PAGES)
        self.tree = not chosen and self.queries > 1 and chance.random() < 0.5
        self.causal = self.tree or (not chosen and chance.random() < 0.8)
        self.lengths = lengths_of(chance, self.page, self.queries if self.tree else 0)
        draw = torch.Generator().manual_seed(chance.randrange(1 << 30))
        counts = [-(-each // self.page) for each in self.lengths]
        self.table, pages = table_of(chance, counts, chance.random() < 0.5)
        latents = torch.randn(pages, self.page, 576, generator=draw).to(self.dtype)
        if self.form == "coded":
            cache = coded_latents(latents)
            self.stored = _decoded(cache)
        elif self.form == "one scale":
            cache = (latents.float() / self.kv_scale).to(FP8)
            self.stored = cache.double().numpy() * self.kv_scale
        else:
            cache, self.stored = latents, latents.double().numpy()
        gap = chance.choice((0, 0, 16, 64))
        room = torch.zeros(pages, self.page, cache.shape[2] + gap, dtype=cache.dtype)
        self.cache = room[..., : cache.shape[2]]
        self.cache.copy_(cache)
        if chosen:
            self._choose(chance, pages)
        self.words = torch.zeros(len(self.lengths), self.queries, dtype=torch.int32)
        for row in range(len(self.lengths)):
            for draft in range(self.queries):
                parent = chance.randrange(draft) if draft else None
                before = 0 if parent is None else int(self.words[row, parent])
                self.words[row, draft] = before | 1 << draft
        shape = len(self.lengths), self.queries, self.heads, 576
        self.q = torch.randn(*shape, generator=draw).to(self.dtype)
        self.planned = chance.choice((False, True, True))

    def _choose(self, chance: random.Random, rows: int) -> None:
        """Rows that are missing, named twice, all missing."""
        top = chance.choice((1, 7, 64, 65, 200))
        slots = [[chance.randrange(rows) for _ in range(top)] for _ in self.lengths]
        for row in slots:
            kind = chance.choice(("all", "some", "none", "twice", "first", "last"))
            for place in range(top):
                gone = {"all": True, "some": chance.random() < 0.3, "first": place < top // 2}
                if gone.get(kind, kind == "last" and place >= top // 2):
                    row[place] = -1
                elif kind == "twice":
                    row[place] = row[place // 3]
        self.lengths = [chance.choice((0, 1, top, top, max(1, top - 1))) for _ in slots]
        self.table = torch.tensor(slots, dtype=torch.int32)
        for row, count in enumerate(self.lengths):
            self.table[row, count:] = NO_PAGE

    def __str__(self) -> str:
        names = ("heads", "queries", "dtype", "form", "page", "tree", "causal", "lengths", "chosen")
        return (
            ", ".join(f"{name}={getattr(self, name)}" for name in names)
            + f", {self.cache.stride()}"
        )

    def wanted(self) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((len(self.lengths), self.queries, self.heads, 512))
        lse = np.full(out.shape[:3], -np.inf)
        q = self.q.double().numpy()
        for row, length in enumerate(self.lengths):
            place = np.arange(length)
            ids = self.table[row].numpy().astype(np.int64)
            pages = ids[place // self.page]
            there = pages >= 0
            kv = self.stored[np.where(there, pages, 0), place % self.page]
            for query in range(self.queries):
                own = length - self.queries + query
                seen = there.copy()
                if self.tree:
                    draft = place - (length - self.queries)
                    word = int(self.words[row, query])
                    seen &= (draft < 0) | ((word >> np.maximum(draft, 0)) & 1 == 1)
                elif self.causal:
                    seen &= place <= own
                for head in range(self.heads):
                    line = softmax(kv[seen] @ q[row, query, head] * SCALE, kv[seen][:, :512], None)
                    out[row, query, head], lse[row, query, head] = line
        return out.reshape(-1, self.heads, 512), lse.reshape(-1, self.heads)

    def found(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        cache, table, q = _moved(self.cache), _moved(self.table), self.q.to("cuda")
        lengths = torch.tensor(self.lengths, dtype=torch.int32).to("cuda")
        asked: dict[str, Any] = {"scale": ASKED, "kv_scale": self.kv_scale, "return_lse": True}
        if self.chosen:
            told = q[:, 0].contiguous(), cache[:, 0], table, lengths
            results = [sparse_mla_decode(*told, **asked) for _ in range(2)]
        else:
            asked |= {"causal": self.causal, "tree": self.words.to("cuda") if self.tree else None}
            plan = plan_mla_decode(q, cache).fill(lengths) if self.planned else None
            results = [mla_decode(q, cache, table, lengths, **asked, plan=plan) for _ in range(2)]
        return [
            (out.cpu().reshape(-1, self.heads, 512), lse.cpu().reshape(-1, self.heads))
            for out, lse in results
        ]


def _decoded(coded: torch.Tensor) -> np.ndarray:
    """FlashMLA's layout by its definition: 512 codes, 4 scales in float32, 64 elements in bfloat16."""
    codes = coded[..., :512].contiguous().view(FP8).double().unflatten(-1, (4, 128))
    scales = coded[..., 512:528].contiguous().view(torch.float32).double()
    rope = coded[..., 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat(((codes * scales[..., None]).flatten(-2), rope), -1).numpy()


def compare(found: torch.Tensor, wanted: np.ndarray, name: str) -> None:
    """Equal up to the rounding of 16 bits; NaN and infinity in the same places."""
    got = found.double().numpy().reshape(wanted.shape)
    for kind in (np.isnan, np.isposinf, np.isneginf):
        places = np.argwhere(kind(got) != kind(wanted))
        assert not len(places), f"{name}: {kind.__name__} elsewhere, at {places[:4].tolist()}"
    finite = np.isfinite(wanted)
    difference = np.where(finite, got, 0) - np.where(finite, wanted, 0)
    lines = np.abs(difference).reshape(*wanted.shape[:2], -1).max(-1)
    largest = max(1.0, np.abs(np.where(finite, wanted, 0)).max())
    worst = np.unravel_index(lines.argmax(), lines.shape) if lines.size else ()
    assert lines.max(initial=0) <= 3e-2 * largest, f"{name} differs by {lines.max():.1e} at {worst}"


KINDS: dict[str, Callable[[random.Random], Any]] = {
    "paged": Paged,
    "mixed": functools.partial(Paged, mixed=True),
    "mla": Latent,
    "chosen": functools.partial(Latent, chosen=True),
}


def drawn(kind: str, seed: int) -> None:
    given = KINDS[kind](random.Random(f"{kind} {seed}"))
    out, lse = given.wanted()
    with gpu(), few_processors():
        try:
            results = given.found()
        except ValueError as error:
            if "must be" in str(error) or "pass" in str(error):
                print(f"refused: {given}: {error}", file=sys.stderr)
                return
            raise AssertionError(f"{given}: refused without a way out: {error}") from None
        except Exception as error:
            raise AssertionError(f"{given}: {type(error).__name__}: {error}") from error
        try:
            for found_out, found_lse in results:
                compare(found_out, out, "out")
                if found_lse is not None:
                    compare(found_lse, lse, "lse")
        except AssertionError as error:
            raise AssertionError(f"{error}; {given}") from None


def controls() -> None:
    """A factor of the scores that is a little too large is found, by its results."""
    with mock.patch.dict(globals(), {"ASKED": 1.3 * SCALE}):
        found = {kind: problem_of(functools.partial(drawn, kind, 1)) for kind in KINDS}
    other = {
        kind: problem
        for kind, problem in found.items()
        if not re.search("differs by|elsewhere", problem)
    }
    assert not other, f"not found: {other}"


DRAWN: dict[str, Case] = {
    "drawn, controls": controls,
    **{
        f"drawn, {kind} {seed}": functools.partial(drawn, kind, seed)
        for kind in KINDS
        for seed in range(12)
    },
}
