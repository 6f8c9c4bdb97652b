# SPDX-License-Identifier: Apache-2.0
"""Ranks whose caches hold the same KV, in layouts of their own, and what is gathered from them."""

import random

import torch
from hypothesis import strategies as st

from pd_connector.codec import DTYPES
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route
from support.caches import LAYOUTS, ON_THE_HOST, Rank, everything
from support.setups import LATENT, Layer, Model, Setup

CODECS = ("fp8_e4m3", "int8", "raw")


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


Key = tuple[int, int, int, bool]  # layer, head, token, whether of V


Dense = dict[Key, torch.Tensor]  # as stored


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.element_size()])


def element(rank: Rank, key: Key) -> torch.Tensor:
    """The stored elements of one token."""
    layer = key[0]
    return rank.storage[layer][torch.tensor(rank.places(*key))]


def fill(ranks: list[Rank], tokens: int, seed: int, spread: bool) -> Dense:
    """Give all ranks that hold an element the same one.

    Args:
        spread: ordinary numbers instead of any bits.
    """
    source = torch.Generator().manual_seed(seed)
    dense: Dense = {}
    for rank in ranks:
        for key in everything(rank, range(tokens)):
            places, storage = rank.places(*key), rank.storage[key[0]]
            if key not in dense:
                if spread:
                    numbers = torch.randn(len(places), generator=source)
                    dense[key] = numbers.to(storage.dtype)
                else:
                    size = storage.element_size() * len(places)
                    noise = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=source)
                    dense[key] = noise.view(storage.dtype)
            bits(storage)[torch.tensor(places)] = bits(dense[key]).to(storage.device)
    return dense


def converted(x: torch.Tensor, ours: Setup, theirs: Setup, v: bool) -> torch.Tensor:
    """What a token's elements become in a cache of another dtype: by hand, in float64."""
    numbers = x.double()
    if ours.dtype == "fp8_e4m3":
        numbers = numbers * ours.scales[v]
    if theirs.dtype == "fp8_e4m3":
        numbers = (numbers / theirs.scales[v]).float().clamp(-448, 448)
    return numbers.float().to(DTYPES[theirs.dtype])


def gathered(rank: Rank, route: Route, chunk: Chunk) -> memoryview:
    pages = rank.pages(route.source, chunk.pages(route.source.page_size))
    slot = memoryview(bytearray(chunk.nbytes(route) + 7))
    filled = rank.cache.gather(route, chunk, pages, slot, rank.cache.fence())
    assert len(filled) == chunk.nbytes(route)
    assert bytes(slot[len(filled) :]) == bytes(7), "nothing behind the chunk is written"
    in_place = rank.cache.in_place(route, chunk, pages)
    assert in_place is None or bytes(in_place) == bytes(filled)
    return filled


def snapshot(rank: Rank) -> dict[int, torch.Tensor]:
    return {layer: storage.clone() for layer, storage in rank.storage.items()}


def ranks(model: Model, setup: Setup, tokens: int, seed: int, device: str = "cpu") -> list[Rank]:
    chance = random.Random(seed)
    return [Rank(geometry, tokens, chance, device) for geometry in setup.geometries(model)]


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    stop = draw(st.integers(1, 70))
    return draw(st.integers(0, stop - 1) | st.sampled_from([0, stop // 16 * 16 % stop])), stop


LAYERS = st.sampled_from(
    [
        (Layer(2),) * 2,
        (Layer(4, 8, 8), Layer(2, 4, 4, window=20), Layer(4, 8, 8)),
        (Layer(1, 3, 3),),
        (LATENT,) * 3,
    ]
)


@st.composite
def setups(draw: st.DrawFn, model: Model, on_host: bool = True) -> Setup:
    latent = model[0].kind == "latent"
    known = ["HND", "HND in parts", "apart"] if latent else list(LAYOUTS)
    if on_host and all(layer.value_dim and layer.value_dim % 4 == 0 for layer in model):
        known += ON_THE_HOST
    return Setup(
        tp=draw(st.sampled_from([1, 2, 4])),
        starts=draw(st.sampled_from([(0,), (0, 1)])) if len(model) > 1 else (0,),
        labels=(0,) * len(model),
        page_sizes=(draw(st.sampled_from([16, 32])),),
        layout=draw(st.sampled_from(known)),
    )
