# SPDX-License-Identifier: Apache-2.0
"""Kernels and their references give pd_connector's own payloads and pages, byte for byte."""

import contextlib
import random

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kernel_caches import DTYPES, chunk_of, side, sloppy
from support.caches import LAYOUTS, Rank
from support.setups import Layer, Model, Setup

from pd_connector.codec import COMPILER
from pd_connector.plan.chunks import Chunk, plan
from pd_connector.plan.route import Route, routes
from pd_kernels.checksum import checksum_of
from pd_kernels.transfer import finish, new_sums
from pd_kernels.transfer.gather import launch_gather, reference_gather
from pd_kernels.transfer.scatter import launch_scatter, reference_scatter

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
LAYERS = Layer(2, 32, 16), Layer(2, 16, 16), Layer(2, 48, 48)
LATENT = Layer(1, 144, 0, kind="latent")


def rank_of(model: Model, setup: Setup, tokens: int, seed: int, spread: float = 1.0) -> Rank:
    """The last rank of a setup, with ordinary numbers in its pages."""
    rank = Rank(setup.geometries(model)[-1], tokens, random.Random(seed))
    source = torch.Generator().manual_seed(seed)
    for storage in rank.storage.values():
        numbers = torch.randn(storage.shape, generator=source) * spread
        storage.copy_(numbers.clamp(-400, 400).to(storage.dtype))
    return rank


def bits(x: torch.Tensor) -> torch.Tensor:
    """As integers, all NaN alike: which of them a conversion gives is nobody's promise."""
    quiet = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return quiet.view(BITS[x.element_size()])


def one_nan(payload: bytes) -> bytes:
    """With FP8's NaN of both signs alike: no scale of these tests has such bytes."""
    return payload.replace(b"\xff", b"\x7f")


def wanted_payload(rank: Rank, route: Route, planned: Chunk) -> bytes:
    pages = rank.pages(route.source, planned.pages(route.source.page_size))
    slot = memoryview(bytearray(planned.nbytes(route)))
    return bytes(rank.cache.gather(route, planned, pages, slot))


def gathered(rank: Rank, route: Route, planned: Chunk, by_kernel: bool) -> bytes:
    """Gather with the kernels or their reference; the sums give pd_connector's checksum."""
    planes, pages = side(rank, route, planned, gather=True)
    nbytes = planned.nbytes(route)
    slot = sloppy(1, nbytes + 32)
    behind = slot[nbytes:].clone()
    sums = new_sums(nbytes, slot.device)
    chunk = chunk_of(planes, pages, route, planned, slot, True, sums)
    chunk.check()
    assert planes.nbytes(chunk.tokens) == nbytes
    if by_kernel:
        launch_gather(chunk)
    else:
        reference_gather(chunk)
    assert torch.equal(slot[nbytes:], behind), "nothing behind the payload is written"
    payload = slot[:nbytes].numpy().tobytes()
    assert finish(sums, nbytes) == checksum_of(memoryview(payload))
    return payload


def scattered(rank: Rank, route: Route, planned: Chunk, payload: bytes, by_kernel: bool) -> None:
    planes, pages = side(rank, route, planned, gather=False)
    slot = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    sums = new_sums(len(payload), slot.device)
    chunk = chunk_of(planes, pages, route, planned, slot, False, sums)
    chunk.check()
    (launch_scatter if by_kernel else reference_scatter)(chunk)
    assert finish(sums, len(payload)) == checksum_of(memoryview(payload))


def same_both_ways(
    source: Rank, theirs: Setup, model: Model, span: tuple[int, int], codec: str
) -> Route:
    """Every chunk from `source` to one rank of `theirs`, by kernels, references and
    pd_connector."""
    destinations = [rank_of(model, theirs, span[1], 7) for _ in range(3)]
    (route,) = routes(source.geometry, destinations[0].geometry, (codec, "raw"), (codec, "raw"))
    for planned in plan((route,), *span, 1 << 22):
        payload = wanted_payload(source, route, planned)
        wanted = payload
        if route.codec == "fp8_e4m3":
            wanted = one_nan(payload)
        for by_kernel in (False, True):
            found = gathered(source, route, planned, by_kernel)
            assert (one_nan(found) if route.codec == "fp8_e4m3" else found) == wanted
        by_cpu, by_reference, by_kernels = destinations
        pages = by_cpu.pages(route.destination, planned.pages(route.destination.page_size))
        by_cpu.cache.scatter(route, planned, pages, memoryview(payload))
        scattered(by_reference, route, planned, payload, by_kernel=False)
        scattered(by_kernels, route, planned, payload, by_kernel=True)
    for layer, storage in by_cpu.storage.items():
        assert torch.equal(bits(by_reference.storage[layer]), bits(storage)), layer
        assert torch.equal(bits(by_kernels.storage[layer]), bits(storage)), layer
    return route


@st.composite
def setups(draw: st.DrawFn, latent: bool) -> Setup:
    known = ["HND", "HND in parts", "apart"] if latent else list(LAYOUTS)
    dtype = draw(st.sampled_from(list(DTYPES)))
    powers = st.sampled_from([1.0, 0.25, 0.37, 3.1])
    return Setup(
        tp=draw(st.sampled_from([1, 2])),
        labels=(0, 0),
        page_sizes=(draw(st.sampled_from([16, 32])),),
        layout=draw(st.sampled_from(known)),
        dtype=dtype,
        scales=(draw(powers), draw(powers)),
    )


@given(st.data(), st.sampled_from([*LAYERS, LATENT]), st.sampled_from(["raw", "int8", "fp8_e4m3"]))
@settings(max_examples=25)
def test_between_any_two_caches_payload_checksum_and_pages_are_those_of_pd_connector(
    data: st.DataObject, layer: Layer, codec: str
) -> None:
    latent = layer.kind == "latent"
    ours, theirs = (data.draw(setups(latent), name) for name in ("ours", "theirs"))
    theirs = data.draw(st.just(theirs) | st.just(ours), "theirs or alike")
    stop = data.draw(st.integers(1, 150))
    span = data.draw(st.integers(0, stop - 1)), stop
    model = (layer, layer)
    source = rank_of(model, ours, stop, data.draw(st.integers(0, 99)))
    route = same_both_ways(source, theirs, model, span, codec)
    event(route.codec)


@pytest.mark.parametrize("pages", [(16, 64), (64, 128), (128, 16)])
@pytest.mark.parametrize("codec", ["raw", "int8", "fp8_e4m3"])
def test_pages_of_other_sizes(codec: str, pages: tuple[int, int]) -> None:
    """With first and last pages that are not full, and super-pages that begin within a page."""
    model = (Layer(2, 32, 32),)
    ours, theirs = (Setup(page_sizes=(size,), layout="NHD") for size in pages)
    same_both_ways(rank_of(model, ours, 300, 1), theirs, model, (11, 300), codec)


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8_e4m3"])
def test_rows_that_are_not_whole_sections_take_the_reference(codec: str) -> None:
    """Which is what the operations do with them; kernels would miss their alignment."""
    model = (Layer(2, 3, 5),) * 2
    source, destination = rank_of(model, Setup(), 40, 1), rank_of(model, Setup(tp=2), 40, 2)
    (route,) = routes(source.geometry, destination.geometry, (codec, "raw"), (codec, "raw"))
    for planned in plan((route,), 3, 40, 1 << 22):
        payload = wanted_payload(source, route, planned)
        assert gathered(source, route, planned, by_kernel=False) == payload
        before = [storage.clone() for storage in destination.storage.values()]
        scattered(destination, route, planned, payload, by_kernel=False)
        ours = [storage.clone() for storage in destination.storage.values()]
        pages = destination.pages(route.destination, planned.pages(16))
        destination.cache.scatter(route, planned, pages, memoryview(payload))
        for old, mine, theirs in zip(before, ours, destination.storage.values(), strict=True):
            assert torch.equal(bits(mine), bits(theirs))
            assert not torch.equal(bits(mine), bits(old))


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8_e4m3"])
def test_heads_that_are_many_ranks(codec: str) -> None:
    model = (Layer(8, 16, 16),) * 2
    source = rank_of(model, Setup(tp=2), 40, 1)
    same_both_ways(source, Setup(tp=4, layout="NHD"), model, (0, 40), codec)
    few = rank_of(model, Setup(tp=4), 40, 1)
    same_both_ways(few, Setup(tp=2, layout="NHD"), model, (0, 40), codec)


@pytest.mark.parametrize("codec", ["raw", "fp8_e4m3"])
def test_whole_pages_pass_as_they_are(codec: str) -> None:
    """Where both sides are alike; of some heads, where these are apart."""
    model = (Layer(4, 16, 16),) * 2
    source = rank_of(model, Setup(dtype="fp8_e4m3"), 64, 1)
    for theirs in (Setup(dtype="fp8_e4m3"), Setup(dtype="fp8_e4m3", tp=2)):
        assert same_both_ways(source, theirs, model, (0, 64), codec).verbatim


SPREADS = [2.0**-140, 2.0**-120, 2.0**-9, 1.0, 440.0, 2.0**100]


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("spread", SPREADS)
def test_magnitudes_from_subnormal_to_huge(codec: str, spread: float) -> None:
    model = (Layer(2, 32, 32),)
    source = rank_of(model, Setup(), 40, 1)
    storage = source.storage[0]
    storage.copy_((storage.double() * spread).to(storage.dtype))
    same_both_ways(source, Setup(layout="NHD"), model, (3, 40), codec)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities and NaN
@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3", "raw"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("theirs", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_bit_pattern_of_16_bits(codec: str, dtype: str, theirs: str, compiled: bool) -> None:
    """Zeros, subnormals, infinities and NaN: these stay visible, as pd_connector promises. The
    bytes are the same whether pd_connector's loops are compiled or not."""
    model = (Layer(1, 128, 128),)
    source = rank_of(model, Setup(dtype=dtype), 512, 1)
    storage = source.storage[0]
    every = torch.arange(storage.numel()).to(torch.int16)
    shuffled = torch.randperm(len(every), generator=torch.Generator().manual_seed(5))
    storage.view(torch.int16).copy_(every[shuffled])
    setup = Setup(dtype=theirs, layout="NHD", scales=(0.7, 2.0))
    assert COMPILER.wait()
    with contextlib.nullcontext() if compiled else COMPILER.off():
        same_both_ways(source, setup, model, (0, 256), codec)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_codes_at_ties_are_rounded_to_even(
    dtype: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotients that lie half way between two codes, which a product with a reciprocal misses."""
    if not packed:
        element_by_element(monkeypatch)
    model = (Layer(1, 128, 128),)
    source = rank_of(model, Setup(dtype=dtype), 128, 1)
    view = source.views[0].key
    halves = (torch.arange(view.numel()).view(view.shape) % 253 - 126) / 2
    view.copy_(halves * 1.5)
    view[:, :, :, ::2] = halves[:, :, :, ::2] * 3
    same_both_ways(source, Setup(layout="NHD"), model, (0, 128), "int8")


def element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers take the way of rows that are not aligned."""
    monkeypatch.setattr("pd_kernels.transfer.gather.packed", lambda _: False)


def test_quotients_near_ties_are_rounded_as_a_division_does() -> None:
    """All pairs of a magnitude of 11 bits and a scale of 8 whose quotient is nearest to a tie, by
    the arithmetic of `int8_pairs` in numpy."""
    scale = np.arange(128, 256, dtype=np.float32)[:, None]
    value = np.arange(1_024, 2_048, dtype=np.float32)[None, :]
    for power in range(-6, 8):
        element = value * np.float32(2.0**power)
        exact = element.astype(np.float64) / scale
        reciprocal = np.float32(1) / scale
        grid = (element.astype(np.float64) * reciprocal + 1536.0).astype(np.float32)
        found = (grid + np.float32(12582912.0 - 1536.0)) - np.float32(12582912.0)
        small = exact <= 127.5
        assert (found == np.rint(exact))[small].all()


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3"])
def test_element_by_element_gives_the_same(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    element_by_element(monkeypatch)
    model = (Layer(2, 48, 32),)
    same_both_ways(rank_of(model, Setup(), 150, 1), Setup(layout="NHD"), model, (5, 150), codec)
