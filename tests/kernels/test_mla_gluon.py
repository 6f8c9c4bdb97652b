# SPDX-License-Identifier: Apache-2.0
"""The Gluon kernel of `mla_decode`: its own code, emulated (`gluon_emulator.py`), against attention
written out in float32. It has not run on a GPU."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import decode_interpreted
import pytest
import torch
from decode_batches import (
    TREE,
    by_kernel,
    by_reference,
    error,
    latents_by_hand,
    mla_batch,
    tree_words,
)

# isort: split
from gluon_emulator import DeadlockError, UnfencedError, emulate

from pd_kernels.attention import mla_call, mla_gluon, mla_gluon_kernel
from pd_kernels.attention.mla_call import MlaCall
from pd_kernels.tuning import tuned

BOUND = 5e-3
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls take the Gluon kernel, as on a Hopper."""
    monkeypatch.setattr(mla_call, "on_hopper", lambda _: True)
    monkeypatch.setattr(mla_call, "GLUON_LINES", 0)  # fewer lines are emulated faster
    with decode_interpreted.dots_mended():
        yield


def launched_by(
    monkeypatch: pytest.MonkeyPatch, seed: int, changed: dict[str, Any] | None = None
) -> None:
    """Launches of the kernel are emulated, program by program."""

    class Launcher:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def run(num_warps: int, maxnreg: int, **arguments: Any) -> None:
                for program in range(*grid):
                    emulate(seed + program, program, changed or {}, arguments)

            return run

    monkeypatch.setattr(mla_gluon_kernel, "latent_attention_tma", Launcher())


def check(batch: MlaCall, workers: int) -> None:
    assert batch.gluon
    found, lse = by_kernel(batch, workers)
    wanted, sums = by_reference(batch)
    empty = sums == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not found[empty].any()
    assert error(found, wanted) <= BOUND
    assert torch.allclose(lse[~empty], sums[~empty], atol=1e-4, rtol=1e-5)


BATCHES: dict[str, tuple[dict[str, Any], int]] = {
    "an odd number of tiles": ({"lengths": [192, 64]}, 1),
    "tails, and an empty sequence": ({"lengths": [1, 0, 65, 130, 63]}, 2),
    "split rows": ({"lengths": [600, 40, 0]}, 4),
    "128 heads": ({"lengths": [200, 70], "heads": 128}, 1),
    "24 heads, 4 queries": ({"lengths": [200, 3, 70], "heads": 24, "queries": 4}, 1),
    "later tokens": ({"lengths": [150], "queries": 3, "causal": False}, 1),
    "pages of 256": ({"lengths": [400, 90], "page": 256}, 1),
    "float16": ({"lengths": [333, 8], "dtype": torch.float16}, 1),
}


@pytest.mark.parametrize("name", BATCHES)
def test_it_attends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, workers = BATCHES[name]
    launched_by(monkeypatch, 100)
    check(mla_batch(**given), workers)


def test_drafts_of_a_tree_see_their_own_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch's attention; with the mask of a chain the answer is another."""
    launched_by(monkeypatch, 100)
    batch = replace(mla_batch([200, 66], heads=24, queries=5), tree=tree_words(TREE, 2))
    check(batch, 1)
    wanted = latents_by_hand(batch, batch.cache.float(), TREE)
    assert error(by_kernel(batch, 1)[0], wanted) <= BOUND
    assert error(by_kernel(replace(batch, tree=None), 1)[0], wanted) > 10 * BOUND


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_first(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads, products and partitions in any order that the barriers allow."""
    launched_by(monkeypatch, seed)
    check(mla_batch([320, 70], seed=seed + 1), 1)


def test_pages_apart_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of a cache that has something else between its pages."""
    batch = mla_batch([300, 65])
    cache = torch.full((len(batch.cache), 80, 576), torch.nan, dtype=batch.cache.dtype)[:, :64]
    cache.copy_(batch.cache)
    launched_by(monkeypatch, 6)
    found, _ = by_kernel(with_cache(batch, cache), 1)
    assert error(found, by_reference(batch)[0]) <= BOUND


def with_cache(batch: MlaCall, cache: torch.Tensor) -> MlaCall:
    return MlaCall(batch.query, cache, batch.table, batch.lengths, batch.scale, causal=batch.causal)


def test_what_it_cannot_read_is_left_to_the_triton_kernel() -> None:
    latents = mla_batch([100]).cache
    assert not mla_batch([100], page=16).gluon, "tiles would leave their pages"
    assert not mla_batch([100], coded=True).gluon
    odd = torch.zeros(4, 64 * 580, dtype=latents.dtype).as_strided(
        (3, 64, 576), (64 * 580 + 8, 580, 1)
    )
    assert not with_cache(mla_batch([100]), odd).gluon, "pages are not on the tokens' grid"
    with tuned(gluon=False):
        assert not mla_batch([100]).gluon
    assert mla_batch([100]).gluon


def test_it_is_chosen_above_32_lines_on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_call, "GLUON_LINES", 32)
    for heads, queries in ((16, 1), (16, 2), (32, 1)):
        assert not mla_batch([100], heads=heads, queries=queries).gluon
    for heads, queries in ((16, 4), (40, 1), (128, 1)):
        assert mla_batch([100], heads=heads, queries=queries).gluon
    monkeypatch.setattr(mla_call, "on_hopper", lambda _: False)
    assert not mla_batch([100], heads=128).gluon


def test_a_triton_whose_gluon_is_another_takes_its_own_kernel_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pd_kernels.attention.mla_gluon_kernel", None)
    mla_call.gluon_found.cache_clear()
    try:
        assert not mla_batch([100], heads=128).gluon
        assert not mla_batch([100], heads=128).gluon
    finally:
        mla_call.gluon_found.cache_clear()
    (record,) = caplog.records
    assert "its Gluon kernel does not know this version of Triton" in record.message


def test_tokens_behind_a_sequence_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the harm: their NaN, times a weight of 0, are NaN."""
    batch = mla_batch([100])
    launched_by(monkeypatch, 7, {"_clear": lambda tile, real: None})
    assert by_kernel(batch, 1)[0].isnan().any()


def eager(
    source: Any, row: Any, column: int, barriers: Any, place: int, buffer: Any, *_: Any
) -> None:
    """`_fetch` without the wait for an empty buffer."""
    barrier = barriers[0].index(place)
    nbytes = buffer.data.numel() * buffer.dtype.itemsize
    barrier.change(arrivals=1, nbytes=nbytes)
    barrier.machine.load(source, [row, column], barrier, buffer)


@pytest.mark.parametrize(
    ("changed", "harm"),
    [
        ({"_fetch": eager}, (AssertionError, DeadlockError)),
        ({"_tell": lambda told, place: None}, DeadlockError),
        ({"fence_async_shared": lambda: None}, UnfencedError),
    ],
)
def test_what_its_barriers_are_for(
    changed: dict[str, Any], harm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: loads that do not wait for empty buffers, sides that do not tell, products
    without a fence."""
    launched_by(monkeypatch, 8, changed)
    with pytest.raises(harm):
        check(mla_batch([500]), 1)


def test_the_shape_of_a_launch_fits_the_kernel() -> None:
    """64 lines, tiles of 64 tokens, and the boxes that the kernel's buffers have."""
    for heads, queries in itertools.product((16, 128), (1, 2)):
        batch = mla_batch([100], heads, queries=queries)
        assert batch.height == 64
        assert batch.rows.tile == 64
    halves, tails = mla_gluon.descriptors(batch.cache)
    assert halves.block_shape == [64, 256]  # type: ignore[attr-defined]
    assert tails.block_shape == [64, 64]  # type: ignore[attr-defined]
