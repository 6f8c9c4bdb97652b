# SPDX-License-Identifier: Apache-2.0
"""Payloads of one tensor-parallel size become those that ranks of another would have gathered."""

import itertools
import random

import pytest
import torch
from support.caches import Rank, everything
from support.setups import LATENT, Layer, Model, Setup

from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import routes
from pd_kernels.transfer import PayloadShape, Resharding, reshard
from pd_kernels.transfer.reshard import launch_reshard, reference_reshard

CODECS = ["raw", "fp8_e4m3", "int8"]
TOKENS = 140


def payloads(model: Model, ranks: int, codec: str) -> list[torch.Tensor]:
    """What each rank sends to one like it, whose pages are laid out otherwise."""
    ours, theirs = (Setup(tp=ranks, layout=layout).geometries(model) for layout in ("HND", "NHD"))
    found = []
    for mine, other in zip(ours, theirs, strict=True):
        rank = Rank(mine, TOKENS, random.Random(1))
        for layer, head, token, v in everything(rank, range(TOKENS)):
            places = torch.tensor(rank.places(layer, head, token, v))
            source = torch.Generator().manual_seed(hash((layer, head, token, v)) % (1 << 31))
            rank.storage[layer][places] = torch.randn(len(places), generator=source).bfloat16()
        (route,) = routes(mine, other, (codec, "raw"), (codec, "raw"))
        planned = Chunk(0, 0, 0, len(route.layers), 0, TOKENS, False)
        slot = memoryview(bytearray(planned.nbytes(route)))
        pages = rank.pages(route.source, planned.pages(16))
        rank.cache.gather(route, planned, pages, slot)
        found.append(torch.frombuffer(slot, dtype=torch.uint8).clone())
    return found


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("model", [(Layer(4, 16, 16),), (LATENT._replace(key_dim=48),)])
def test_any_size_to_any_other(model: Model, codec: str) -> None:
    layer = model[0]
    every = {ranks: payloads(model, ranks, codec) for ranks in (1, 2, 4)}
    payload = PayloadShape(codec, layer.heads, 1, TOKENS, layer.key_dim, layer.value_dim, 2)
    for ours, theirs in itertools.product(every, repeat=2):
        for call in (reference_reshard, launch_reshard, reshard):
            slabs = [torch.full((len(slab) + 32,), 0xA5).byte() for slab in every[theirs]]
            call(Resharding.of(every[ours], slabs, payload))
            for slab, wanted in zip(slabs, every[theirs], strict=True):
                assert torch.equal(slab[: len(wanted)], wanted)
                assert (slab[len(wanted) :] == 0xA5).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(37, 32, 32), (200, 48, 16), (130, 64, 0), (1, 16, 256)])
@pytest.mark.parametrize("ranks", [(1, 4), (4, 2), (8, 1), (2, 8)])
def test_the_kernel_moves_what_the_reference_moves(
    codec: str, shape: tuple[int, int, int], ranks: tuple[int, int]
) -> None:
    payload = PayloadShape(codec, 4, 2, *shape, 2)
    source = torch.Generator().manual_seed(3)
    sources = [
        torch.randint(0, 256, (payload.nbytes(ranks[0]),), generator=source).byte()
        for _ in range(ranks[0])
    ]
    found = []
    for call in (reference_reshard, launch_reshard):
        slabs = [torch.full((payload.nbytes(ranks[1]),), 0xA5).byte() for _ in range(ranks[1])]
        call(Resharding.of(sources, slabs, payload))
        found.append(torch.stack(slabs))
    assert torch.equal(*found)


def test_slabs_that_cannot_be_are_refused() -> None:
    payload = PayloadShape("raw", 4, 1, 10, 16, 16, 2)
    slab = torch.zeros(payload.nbytes(1), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"wanted {payload.nbytes(1)} dense bytes"):
        Resharding.of([slab], [slab[1:]], payload)
    with pytest.raises(ValueError, match="4 heads on 3 ranks"):
        Resharding.of([slab], [slab] * 3, payload)
