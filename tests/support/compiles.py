# SPDX-License-Identifier: Apache-2.0
"""How many kernels Triton would compile for a GPU before there are chunks, and for chunks then.

A program of its own, because where other tests have imported the kernels they are interpreted:
`python compiles.py` prints JSON. All of Triton up to its compiler is the real thing, and so is its cache of
compiled kernels; the compiler, the device and the launch are not.
"""

import contextlib
import itertools
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.plan.chunks import plan
from pd_connector.plan.route import Route, routes
from pd_connector.plan.sizes import page_part_bytes
from pd_kernels.transfer.chunk_launch import ChunkLaunch
from support.caches import Rank
from support.setups import Layer, Model, Setup

TOKENS = 150
SPANS = ((0, 150), (3, 150), (16, 17))

compiled: list[str] = []
caches: list[dict[Any, Any]] = []


def compile_nothing(
    function: JITFunction, key: str, signature: object, device: int, *_: object
) -> SimpleNamespace:
    kernels = function.device_caches[device][0]
    caches.append(kernels)
    compiled.append(function.__name__)
    kernels[key] = SimpleNamespace(
        launch_metadata=lambda *_: None, run=lambda *_: None, function=0, packed_metadata=()
    )
    return kernels[key]


def pretend() -> None:
    """From here on tensors in host memory are a GPU's."""
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    JITFunction._do_compile = compile_nothing
    ChunkLaunch.fits_kernels = property(lambda launch: launch.whole_sections)  # type: ignore[assignment]
    torch.cuda.device = lambda _: contextlib.nullcontext()  # type: ignore[misc,assignment]


def forget() -> None:
    """What has been compiled so far."""
    compiled.clear()
    for kernels in caches:
        kernels.clear()


def warm(cache: PagedCache, paths: tuple[Route, ...], gathers: bool) -> None:
    while not cache.prepare(paths, gathers=gathers):
        pass


def move(cache: PagedCache, rank: Rank, paths: tuple[Route, ...], gathers: bool) -> None:
    """Every chunk of some transfers, in chunks of some layers or of all."""
    rooms = [max(page_part_bytes(route) + 4096 for route in paths) * n for n in (1, 20)]
    for span, room in itertools.product(SPANS, rooms):
        for chunk in plan(paths, *span, room):
            route = paths[chunk.route]
            group = route.source if gathers else route.destination
            pages = rank.pages(group, chunk.pages(group.page_size))
            slot = memoryview(bytearray(chunk.nbytes(route)))
            if gathers:
                cache.gather(route, chunk, pages, slot)
            else:
                cache.scatter(route, chunk, pages, slot)


def misplaced(view: torch.Tensor) -> torch.Tensor:
    """The same shape, not aligned to 16 bytes."""
    return torch.zeros(view.numel() + 4, dtype=view.dtype)[4:].view(view.shape)


def counted(
    model: Model, ours: Setup, theirs: Setup, codec: str, other: str, misplaces: bool = False
) -> dict[str, int | None]:
    """Compiled on both sides: `before` and with chunks (`after`), by chunks alone (`cold`), and by chunks
    when what was compiled before was for another codec (`other`; None where there is no other).

    Args:
        misplaces: the second layer of both sides is not aligned as the others are.
    """
    found: dict[str, int | None] = dict.fromkeys(("before", "after", "cold", "other"), 0)
    ranks = [
        Rank(setup.geometries(model)[-1], TOKENS, random.Random(1)) for setup in (ours, theirs)
    ]
    source, destination = (rank.geometry for rank in ranks)
    paths = routes(source, destination, (codec, "raw"), (codec, "raw"))
    unlike = routes(source, destination, (other, "raw"), (other, "raw"))
    for rank, gathers in zip(ranks, (True, False), strict=True):
        layers = dict(rank.views)
        if misplaces:
            assert layers[1].value is not None
            moved = misplaced(layers[1].key), misplaced(layers[1].value)
            layers[1] = LayerPages(*moved, ())
        for name, first in (("cold", ()), ("other", unlike), ("after", paths)):
            if [route.codec for route in first] == [
                route.codec for route in paths
            ] and name == "other":
                found[name] = None
                continue
            forget()
            cache = PagedCache(layers, rank.geometry, by_kernels=True)
            warm(cache, first, gathers)
            before = len(compiled)
            move(cache, rank, paths, gathers)
            found[name] += len(compiled) - before
        found["before"] += before
    return found


def cases() -> dict[str, tuple[Any, ...]]:
    plain: Model = (Layer(2, 32, 16),) * 3
    hybrid: Model = (Layer(4, 32, 32), Layer(2, 16, 16, window=40), Layer(4, 32, 32))
    latent: Model = (Layer(1, 48, 0, kind="latent"),) * 3
    like, half = Setup(), Setup(tp=2, page_sizes=(32,), layout="apart")
    fp8 = Setup(dtype="fp8_e4m3", scales=(0.5, 2.0))
    return {
        "whole pages": (plain, like, like, "raw", "int8"),
        "unlike layouts": (plain, like, half, "raw", "fp8_e4m3"),
        "two groups": (hybrid, like, half, "raw", "int8"),
        "latents": (latent, like, Setup(page_sizes=(64,), layout="apart"), "raw", "int8"),
        "int8": (plain, like, half, "int8", "raw"),
        "fp8": (plain, like, half, "fp8_e4m3", "int8"),
        "fp8 of the destination's scale": (plain, like, fp8, "fp8_e4m3", "int8"),
        "int8 of latents": (latent, like, Setup(layout="apart"), "int8", "fp8_e4m3"),
        "FP8 caches of other scales": (plain, fp8, Setup(dtype="fp8_e4m3"), "raw", "raw"),
        "layers that are not all aligned": (
            plain,
            Setup(layout=""),
            Setup(layout=""),
            "raw",
            "int8",
            True,
        ),
        "transposed K": (plain, Setup(layout="packed"), like, "raw", "int8"),
    }


def main() -> None:
    pretend()
    json.dump({name: counted(*case) for name, case in cases().items()}, sys.stdout)


if __name__ == "__main__":
    main()
