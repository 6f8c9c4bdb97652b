# SPDX-License-Identifier: Apache-2.0
"""Every launch that a chunk may need is one that CUDA takes: 65,535 programs at most in the second
and third extent."""

import pytest
import torch

from pd_kernels.transfer import (
    Planes,
    Stored,
    copy_kernel,
    gather_fp8_kernel,
    gather_int8_kernel,
    scatter_kernel,
)
from pd_kernels.transfer.chunk_launch import ChunkLaunch
from pd_kernels.transfer.gather import launch_gather
from pd_kernels.transfer.scatter import launch_scatter

MOST = 65_535
LARGEST_HEAD = 1 << 26  # elements


class Recorder:
    """Takes launches and does nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self.grids.append(grid)
        return lambda *_, **__: None


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for module, kernel in (
        (copy_kernel, "copy_pages"),
        (scatter_kernel, "scatter_decoded"),
        (gather_fp8_kernel, "gather_fp8"),
        (gather_int8_kernel, "gather_int8"),
    ):
        monkeypatch.setattr(module, kernel, recorder)
    return recorder


def chunk(
    codec: str, source: torch.dtype, theirs: torch.dtype, dim: int, tokens: int
) -> ChunkLaunch:
    """A chunk in a cache of one page: a recorded launch reads no memory."""
    views = [torch.zeros(1, 2, 16, dim, dtype=source) for _ in range(2)]
    planes = Planes.of(views[:1], views[1:], 16, codec, Stored(source), Stored(theirs))
    return ChunkLaunch(planes, torch.zeros(1, dtype=torch.int32), torch.empty(0), 0, tokens, None)


FP8 = torch.float8_e4m3fn
KINDS = [
    ("raw", torch.float32, torch.float32),
    ("raw", torch.float32, torch.bfloat16),
    ("raw", torch.bfloat16, FP8),
    ("fp8_e4m3", torch.bfloat16, torch.bfloat16),
    ("fp8_e4m3", torch.bfloat16, FP8),
    ("int8", torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize("dim", [16, 80, 128, 272, 576])
@pytest.mark.parametrize(("codec", "source", "theirs"), KINDS)
def test_the_largest_head_fits(
    launched: Recorder, codec: str, source: torch.dtype, theirs: torch.dtype, dim: int
) -> None:
    whole = chunk(codec, source, theirs, dim, LARGEST_HEAD // dim)
    assert whole.indexable
    launch_gather(whole)
    launch_scatter(whole)
    assert len(launched.grids) == 2
    assert all(max(second, third) <= MOST for _, second, third in launched.grids)


def test_a_head_four_times_as_large_would_not_and_is_left_to_torch(launched: Recorder) -> None:
    whole = chunk("int8", torch.bfloat16, torch.bfloat16, 80, 4 * LARGEST_HEAD // 80)
    launch_gather(whole)
    assert launched.grids[0][1] > MOST
    assert not whole.indexable


def test_many_heads_that_are_each_small_enough_may_be_too_large_together() -> None:
    views = [torch.zeros(1, 8, 16, 128) for _ in range(2)]
    planes = Planes.of(views[:1], views[1:], 16, "raw", *[Stored(torch.float32)] * 2)
    page, slot = torch.zeros(1, dtype=torch.int32), torch.empty(0)
    most = (1 << 28) // (8 * 128)
    assert ChunkLaunch(planes, page, slot, 0, most, None).indexable
    assert not ChunkLaunch(planes, page, slot, 0, most + 1, None).indexable
