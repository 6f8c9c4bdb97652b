# SPDX-License-Identifier: Apache-2.0
"""Within `torch.compile` the operators work on the tensors that they are given, which may be copies
of those that the caller named: kernels go where addresses say, and these must be the copies'."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pd_bench.kernels.caches import CacheViews, Model, make_cache
from pd_kernels.transfer import (
    PayloadShape,
    Planes,
    Resharding,
    Stored,
    gather_pages,
    reshard,
    scatter_pages,
)
from pd_kernels.transfer.chunk_launch import ChunkLaunch

BF16 = Stored(torch.bfloat16)
MODEL = Model("small", 2, 3, 32, 16)
FIRST, TOKENS = 7, 39
PAGES = torch.tensor([5, 0, 3], dtype=torch.int32)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks in host memory take the kernels, which the interpreter runs, by their addresses."""
    monkeypatch.setattr(ChunkLaunch, "fits_kernels", True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    yield
    torch.compiler.reset()


def planes_of(cache: CacheViews) -> Planes:
    return Planes.of(cache.keys, cache.values, 16, "raw", BF16, BF16)


def there_and_back(before: Callable[[Planes], None] = lambda _: None) -> bool:
    """Whether a payload that is scattered and gathered again, compiled as one, comes back, and
    stays in the pages. `before` is told of the planes that take it."""
    cache = make_cache(MODEL, 6, 16, "LBHNC", torch.bfloat16, "cpu")
    planes, into = planes_of(cache), planes_of(cache.clone())
    sent, back, kept = (torch.zeros(planes.nbytes(TOKENS), dtype=torch.uint8) for _ in range(3))
    gather_pages(planes, PAGES, sent, FIRST, TOKENS)
    assert sent.any()
    for view in into.views:
        view.zero_()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(pages: torch.Tensor, slot: torch.Tensor, found: torch.Tensor) -> None:
        scatter_pages(into, pages, slot, FIRST, TOKENS)
        gather_pages(into, pages, found, FIRST, TOKENS)

    before(into)
    compiled(PAGES, sent, back)
    gather_pages(into, PAGES, kept, FIRST, TOKENS)
    return torch.equal(back, sent) and torch.equal(kept, sent)


@pytest.mark.usefixtures("by_kernels")
def test_what_a_compiled_scatter_writes_is_in_the_pages_and_gathered_from_them() -> None:
    assert there_and_back()


@pytest.mark.usefixtures("by_kernels")
def test_with_addresses_from_before_it_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Planes.at

    def stale(into: Planes) -> None:
        def at(*rest: Any, **named: Any) -> Planes:
            return replace(theirs(*rest, **named), table=into.table)

        monkeypatch.setattr(Planes, "at", at)

    assert not there_and_back(stale)


def slabs(payload: PayloadShape, ranks: int) -> list[torch.Tensor]:
    return [torch.zeros(payload.nbytes(ranks), dtype=torch.uint8) for _ in range(ranks)]


def test_what_a_compiled_reshard_writes_is_in_the_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["pd_kernels.transfer.reshard"]  # its name in the package is the function's
    monkeypatch.setattr(module, "_run", module.launch_reshard)
    payload = PayloadShape("int8", 4, 2, 130, 32, 16, 2)
    sources = [torch.randint(0, 256, slab.shape).byte() for slab in slabs(payload, 2)]
    eager, compiled = (Resharding.of(sources, slabs(payload, 4), payload) for _ in range(2))
    reshard(eager)
    torch.compile(reshard, backend="aot_eager", fullgraph=True)(compiled)
    torch.compiler.reset()
    for found, wanted in zip(compiled.destinations, eager.destinations, strict=True):
        assert wanted.any()
        assert torch.equal(found, wanted)
