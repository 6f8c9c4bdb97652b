# SPDX-License-Identifier: Apache-2.0
"""Programs of a head wait for one another where `fp8_e4m3` computes its scales: in whatever order a
device runs them, and however few at once, they end, with the same bytes."""

import random
from collections.abc import Callable

import pytest
import torch
from kernel_caches import sloppy
from triton.runtime import interpreter

from pd_kernels.bench.caches import Model, make_cache
from pd_kernels.transfer import Blocks, Stored, finish, gather_fp8_kernel, new_sums
from pd_kernels.transfer.chunk_launch import ChunkLaunch
from pd_kernels.transfer.gather import launch_gather, reference_gather

BF16 = Stored(torch.bfloat16)
FIRST, TOKENS = 5, 100
LATENT = Model("latent", 1, 1, 576, 0)
UNLIKE = Model("unlike", 1, 2, 192, 128)
TILES = {LATENT: 8, UNLIKE: 3}  # of a head; of UNLIKE's V there are 2
FOREVER = 1 << 30


class Launch:
    """A chunk that is gathered again and again."""

    def __init__(self, model: Model) -> None:
        torch.manual_seed(7)
        cache = make_cache(model, 7, 16, "LBHNC", torch.bfloat16, "cpu")
        self.blocks = Blocks.of(cache.keys, cache.values, 16, "fp8_e4m3", BF16, BF16)
        self.pages = torch.randperm(7).int()

    def payload(self, gather: Callable[[ChunkLaunch], None]) -> tuple[bytes, bytes]:
        """With its checksum."""
        nbytes = self.blocks.nbytes(TOKENS)
        slot = sloppy(3, nbytes)
        sums = new_sums(nbytes, slot.device)
        gather(ChunkLaunch(self.blocks, self.pages, slot, FIRST, TOKENS, sums))
        return slot.numpy().tobytes(), finish(sums, nbytes)


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], list[int]]], None]:
    """Has the programs of a head run in the order that a function of their number gives."""
    builder = interpreter.InterpreterBuilder
    theirs = builder.set_grid_idx

    def use(order: Callable[[int], list[int]]) -> None:
        def ordered(self: interpreter.InterpreterBuilder, x: int, y: int, z: int) -> None:
            theirs(self, order(self.grid_dim[0])[x], y, z)

        monkeypatch.setattr(builder, "set_grid_idx", ordered)

    return use


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs the kernel was launched with, for a head."""
    found: list[int] = []
    theirs = gather_fp8_kernel.gather_fp8

    class Watched:
        def __getitem__(self, grid: tuple[int, int, int]) -> object:
            found.append(grid[0])
            return theirs[grid]

    monkeypatch.setattr(gather_fp8_kernel, "gather_fp8", Watched())
    return found


@pytest.mark.parametrize("model", [LATENT, UNLIKE], ids=lambda model: model.name)
def test_a_head_of_more_tiles_than_run_at_once_is_read_ahead(
    monkeypatch: pytest.MonkeyPatch, programs: list[int], model: Model
) -> None:
    """One program runs after the other here, so a program that polls finds everything published."""
    launch = Launch(model)
    wanted = launch.payload(reference_gather)
    monkeypatch.setattr(gather_fp8_kernel, "resident", lambda _: TILES[model] - 1)
    assert launch.payload(lambda chunk: launch_gather(chunk, FOREVER)) == wanted
    monkeypatch.setattr(gather_fp8_kernel, "resident", lambda _: TILES[model])
    assert launch.payload(lambda chunk: launch_gather(chunk, 0)) == wanted
    assert programs == [2 * TILES[model], TILES[model]]


def shuffled(programs: int) -> list[int]:
    return random.Random(5).sample(range(programs), programs)


@pytest.mark.parametrize("order", [lambda n: list(range(n))[::-1], shuffled])
@pytest.mark.parametrize("resident", [1, 99], ids=["ahead", "not ahead"])
def test_in_any_order_every_program_finds_or_reads_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
    in_order: Callable[[Callable[[int], list[int]]], None],
    order: Callable[[int], list[int]],
    resident: int,
) -> None:
    """Those that come before what they wait for read it themselves."""
    launch = Launch(LATENT)
    wanted = launch.payload(reference_gather)
    monkeypatch.setattr(gather_fp8_kernel, "resident", lambda _: resident)
    in_order(order)
    assert launch.payload(lambda chunk: launch_gather(chunk, 2)) == wanted


def test_scales_that_are_given_need_no_other_program(programs: list[int]) -> None:
    cache = make_cache(LATENT, 7, 16, "LBHNC", torch.bfloat16, "cpu")
    scaled = Stored(torch.float8_e4m3fn, (0.5,))
    blocks = Blocks.of(cache.keys, [], 16, "fp8_e4m3", BF16, scaled)
    slot = torch.zeros(blocks.nbytes(TOKENS), dtype=torch.uint8)
    launch_gather(ChunkLaunch(blocks, torch.arange(7).int(), slot, FIRST, TOKENS, None), FOREVER)
    assert programs == [1]  # heads come first, tiles second


def test_without_a_gpu_an_h200_s_number_is_taken() -> None:
    assert gather_fp8_kernel.resident(torch.device("cpu")) == 4 * 132
