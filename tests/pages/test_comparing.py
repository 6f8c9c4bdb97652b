# SPDX-License-Identifier: Apache-2.0
"""How far a payload is from a cache: nothing where both hold the same KV, whatever their layouts, dtypes and codecs,
and far where one of them is wrong in any layer, page, head or part."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.caches import Rank, everything
from support.filled import CODECS, LAYERS, bits, fill, gathered, ranks, setups, snapshot, spans
from support.setups import Layer, Model, Setup

from pd_connector.codec import DTYPES
from pd_connector.kv.audit_tolerance import Tolerance, tolerance
from pd_connector.kv.coding import Part
from pd_connector.pages.copiers import HostCopier, TorchCopier
from pd_connector.plan.chunks import Chunk, plan
from pd_connector.plan.route import Route, routes
from pd_connector.plan.sizes import page_part_bytes
from pd_connector.protocol.consuming.audit import Distance, relative

MODEL: Model = (Layer(2, 16, 16),) * 2
SPAN = 3, 100


def compared(
    sources: list[Rank],
    destination: Rank,
    span: tuple[int, int] = SPAN,
    codecs: tuple[str, ...] = ("raw",),
    lost: tuple[int, ...] = (),
) -> Iterator[tuple[Route, Chunk, list[Distance]]]:
    """Every chunk, with its distances. Nothing is written.

    Args:
        lost: pages of the prompt that the destination has no more.
    """
    before = snapshot(destination)
    for source in sources:
        paths = routes(source.geometry, destination.geometry, codecs, codecs)
        chunk_bytes = max((page_part_bytes(route) + 4096 for route in paths), default=1) * 3
        for chunk in plan(paths, *span, chunk_bytes):
            route = paths[chunk.route]
            numbers = chunk.pages(route.destination.page_size)
            pages = destination.pages(route.destination, numbers)
            left = [-1 if n in lost else page for n, page in zip(numbers, pages, strict=True)]
            payload = gathered(source, route, chunk).toreadonly()
            yield route, chunk, destination.cache.compare(route, chunk, left, payload)
    for layer, storage in destination.storage.items():
        assert torch.equal(bits(storage), bits(before[layer]))


def largest(*args: object, **options: object) -> float:
    found = [d for _, _, all_ in compared(*args, **options) for one in all_ for d in one.by_page]  # type: ignore[arg-type]
    return max(found, default=0.0)


def pair(ours: Setup, theirs: Setup, model: Model = MODEL) -> tuple[list[Rank], list[Rank]]:
    """Ranks of a producer and of a consumer that hold the same KV."""
    sources, destinations = ranks(model, ours, SPAN[1], 1), ranks(model, theirs, SPAN[1], 2)
    dense = fill(sources, SPAN[1], 3, spread=True)
    for rank in destinations:
        for key in everything(rank, range(SPAN[1])):
            storage, places = rank.storage[key[0]], torch.tensor(rank.places(*key))
            bits(storage)[places] = bits(dense[key].float().to(storage.dtype))
    return sources, destinations


@pytest.mark.parametrize("by_torch", [False, True], ids=["by numpy", "as on a GPU"])
@given(st.data(), LAYERS, spans(), st.sampled_from(list(DTYPES)), st.integers(0, 1000))
@settings(max_examples=30)
def test_the_same_kv_is_no_distance_apart_between_any_two_layouts(
    by_torch: bool,
    data: st.DataObject,
    model: Model,
    span: tuple[int, int],
    dtype: str,
    seed: int,
) -> None:
    ours = data.draw(setups(model, not by_torch), "ours")
    theirs = data.draw(setups(model, not by_torch) | st.just(ours), "theirs")
    ours, theirs = (replace(setup, dtype=dtype) for setup in (ours, theirs))
    sources = ranks(model, ours, span[1], seed)
    destinations = ranks(model, theirs, span[1], seed + 1)
    fill([*sources, *destinations], span[1], seed, spread=True)
    for rank in (*sources, *destinations):
        rank.cache._copies.copier = TorchCopier() if by_torch else HostCopier()
    for destination in destinations:
        seen: dict[tuple[int, Part], set[int]] = {}
        for route, chunk, found in compared(sources, destination, span):
            size = route.destination.page_size
            for one in found:
                assert list(one.pages) == list(chunk.pages(size))
                assert list(one.by_page) == [0.0] * len(one.pages)
                assert list(one.by_token) == [0.0] * len(one.pages)
                assert [token // size for token in one.tokens] == list(one.pages)
                assert one.own > 0
                seen.setdefault((one.layer, one.part), set()).update(one.pages)
        for layer, group in destination.groups.items():
            assert seen[layer, Part.KEY], "every layer is compared"
            assert ((layer, Part.VALUE) in seen) == bool(group.value_dim)


@pytest.mark.parametrize("theirs", list(DTYPES))
@pytest.mark.parametrize("ours", list(DTYPES))
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", ["packed", "tiled"])
def test_what_codecs_and_dtypes_round_is_far_within_the_tolerance(
    ours: str, theirs: str, codec: str, layout: str
) -> None:
    sources, destinations = pair(
        Setup(dtype=ours), Setup(dtype=theirs, tp=2, layout=layout, page_sizes=(32,))
    )
    for destination in destinations:
        for route, _, found in compared(sources, destination, codecs=(codec, "raw")):
            allowed = tolerance(route.source.dtype, route.destination.dtype, route.codec)
            for one in found:
                assert max(one.by_page) < allowed.page / 4
                assert max(one.by_token) < allowed.token / 4
                assert relative(one.apart, one.own) < allowed.layer / 3


def _change(
    rank: Rank, layer: int, v: bool, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    seen = rank.view(layer, Part.VALUE if v else Part.KEY)
    seen.copy_(change(seen.clone()))


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "K of a checkpoint scaled by 1.5": lambda x: x * 1.5,
    "scaled down": lambda x: x / 1.5,
    "zeros": torch.zeros_like,
    "another head": lambda x: x.flip(1),
    "another sign of half the dims": lambda x: torch.cat((-x[..., :8], x[..., 8:]), -1),
    "another rotation": lambda x: x.roll(1, -1),
    "not a number": lambda x: torch.full_like(x, math.nan),
    "infinite": lambda x: torch.full_like(x, math.inf),
}


@pytest.mark.parametrize("wrong", list(WRONG))
@pytest.mark.parametrize("setup", [Setup(), Setup(tp=2, layout="NHD", page_sizes=(32,))])
@pytest.mark.parametrize("v", [False, True])
def test_what_is_wrong_in_one_layer_is_far_in_that_layer_and_nowhere_else(
    wrong: str, setup: Setup, v: bool
) -> None:
    sources, destinations = pair(Setup(), setup)
    for source in sources:
        _change(source, 1, v, WRONG[wrong])
    for destination in destinations:
        for route, _, found in compared(sources, destination):
            allowed = tolerance(route.source.dtype, route.destination.dtype, route.codec)
            for one in found:
                here = one.layer == 1 and (one.part is Part.VALUE) == v
                assert (relative(one.apart, one.own) > allowed.layer) == here
                assert not here or min(one.by_page) > allowed.page


@pytest.mark.parametrize("wrong", list(WRONG))
@pytest.mark.parametrize("which", ["producer", "consumer"])
@pytest.mark.parametrize("v", [False, True])
def test_what_is_wrong_is_far_also_where_the_other_cache_is_fp8(
    wrong: str, which: str, v: bool
) -> None:
    """Rounding to FP8 is allowed for, and leaves margins: right layers need a third of what is
    allowed, wrong ones exceed it by a quarter."""
    if which == "consumer" and wrong in ("not a number", "infinite"):
        pytest.skip("nothing can be held to what this engine itself has not computed")
    fp8, half = Setup(dtype="fp8_e4m3"), Setup(dtype="bfloat16")
    ours, theirs = (half, fp8) if which == "producer" else (fp8, half)
    sources, destinations = pair(ours, theirs)
    for rank in sources if which == "producer" else destinations:
        _change(rank, 1, v, WRONG[wrong])
    for destination in destinations:
        for route, _, found in compared(sources, destination):
            allowed = tolerance(route.source.dtype, route.destination.dtype, route.codec)
            for one in found:
                distance = relative(one.apart, one.own)
                if one.layer == 1 and (one.part is Part.VALUE) == v:
                    assert distance > 1.25 * allowed.layer
                else:
                    assert distance < allowed.layer / 3


def test_layers_that_are_swapped_are_far() -> None:
    sources, (destination,) = pair(Setup(), Setup())
    (source,) = sources
    source.storage[0].copy_(source.storage[1])
    assert largest(sources, destination) > 1


def test_one_page_of_another_request_is_told_by_its_number() -> None:
    sources, (destination,) = pair(Setup(), Setup())
    (source,) = sources
    group = source.geometry.groups[0]
    for page in (4, 2):
        (place,) = source.pages(group, range(page, page + 1))
        view = source.view(1, Part.KEY)
        view[place] = torch.randn_like(view[place].float()).to(view.dtype)
    far = {
        (one.layer, one.part, page)
        for _, _, found in compared(sources, destination)
        for one in found
        for page, distance in zip(one.pages, one.by_page, strict=True)
        if distance > tolerance("bfloat16", "bfloat16", "raw").page
    }
    assert far == {(1, Part.KEY, 2), (1, Part.KEY, 4)}


WRONG_TOKEN: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "another token's": lambda x, token: x[..., token + 1, :],
    "zeros": lambda x, token: torch.zeros_like(x[..., token, :]),
    "zeros in one head": lambda x, token: torch.cat(
        (torch.zeros_like(x[..., :1, token, :]), x[..., 1:, token, :]), -2
    ),
    "scaled by 1.75": lambda x, token: x[..., token, :] * 1.75,
}


@pytest.mark.parametrize(
    ("page_size", "theirs", "ours"),
    [(64, theirs, ours) for theirs in DTYPES for ours in DTYPES]
    + [(size, "bfloat16", "bfloat16") for size in (16, 32, 128)],
)
def test_one_wrong_token_is_named_at_every_page_size_dtype_and_codec(
    page_size: int, theirs: str, ours: str
) -> None:
    """An error at the edge of a chunk looks like that. The other tokens of its page would hide it."""
    token = 67
    sources, (destination,) = pair(
        Setup(dtype=theirs, page_sizes=(page_size,)), Setup(dtype=ours, page_sizes=(page_size,))
    )
    (source,) = sources
    number, inside = divmod(token, page_size)
    (page,) = source.pages(source.geometry.groups[0], range(number, number + 1))
    whole = {part: source.view(1, part)[page].clone() for part in Part}
    for codec, (name, wrong) in itertools.product(CODECS, WRONG_TOKEN.items()):
        for part, right in whole.items():
            view = source.view(1, part)
            view[page] = right
            view[page, :, inside] = wrong(right.float(), inside).to(view.dtype)
        for route, chunk, found in compared(sources, destination, codecs=(codec, "raw")):
            allowed = tolerance(route.source.dtype, route.destination.dtype, route.codec)
            for one in found:
                by_token = zip(one.tokens, one.by_token, strict=True)
                far = {token for token, distance in by_token if not distance <= allowed.token}
                here = one.layer == 1 and chunk.first_token <= token < chunk.stop_token
                assert far == ({token} if here else set())
                if not here:
                    continue
                assert one.moved[0].token == token
                if page_size >= 64 and name == "zeros" and allowed.page > 0.2:
                    of_page = one.by_page[list(one.pages).index(number)]
                    assert of_page <= allowed.page, "the harm without it: no page is far"


def test_a_token_that_is_larger_than_all_others_together_hides_none() -> None:
    """The first token of a prompt often is: what is usual is the median, not the mean."""
    sources, (destination,) = pair(Setup(), Setup())
    group = destination.geometry.groups[0]
    for rank in (sources[0], destination):
        (first,) = rank.pages(group, range(1))
        rank.view(0, Part.KEY)[first, :, 3] *= 100
    (last,) = sources[0].pages(group, range(5, 6))
    sources[0].view(0, Part.KEY)[last, :, 4] = 0
    far = {
        token
        for _, _, found in compared(sources, destination)
        for one in found
        for token, distance in zip(one.tokens, one.by_token, strict=True)
        if distance > tolerance("bfloat16", "bfloat16", "raw").token
    }
    assert far == {84}


def test_a_token_that_is_almost_zero_does_not_make_rounding_look_large() -> None:
    sources, (destination,) = pair(Setup(), Setup())
    group = destination.geometry.groups[0]
    for rank in (sources[0], destination):
        (page,) = rank.pages(group, range(5, 6))
        view = rank.view(0, Part.VALUE)
        view[page, :, 4] *= 0.001
        view[page, :, 4] += 0.01 * torch.randn_like(view[page, :, 4].float()).to(view.dtype)
    found = [one for _, _, all_ in compared(sources, destination) for one in all_]
    assert max(distance for one in found for distance in one.by_token) < 0.1


def test_tokens_behind_the_last_that_is_wanted_do_not_count() -> None:
    """They come along where whole pages pass, and are what each side computed since."""
    sources, (destination,) = pair(Setup(), Setup())
    group = destination.geometry.groups[0]
    (last,) = destination.pages(group, range(6, 7))  # tokens 96 to 111; wanted are those up to 99
    for layer in (0, 1):
        view = destination.view(layer, Part.KEY)
        view[last, :, 4:] = 100
    assert largest(sources, destination) == 0
    view[last, :, 3:] = 100
    assert largest(sources, destination) > 1


def test_pages_that_a_window_has_passed_are_passed_over() -> None:
    sources, (destination,) = pair(Setup(), Setup())
    source_view = sources[0].view(0, Part.VALUE)
    source_view.zero_()
    pages = {
        page
        for _, _, found in compared(sources, destination, lost=(0, 1, 2))
        for one in found
        for page in one.pages
    }
    assert pages == {3, 4, 5, 6}
    assert not [
        one for _, _, f in compared(sources, destination, lost=tuple(range(7))) for one in f
    ]


def test_a_head_that_is_almost_zero_does_not_make_rounding_look_large() -> None:
    """Rounding in the residual is a large part of a head with a thousandth of the others' size."""
    sources, (destination,) = pair(Setup(), Setup())
    for rank in (sources[0], destination):
        view = rank.view(0, Part.VALUE)
        view[:, 0] *= 0.001
        view[:, 0] += 0.01 * torch.randn_like(view[:, 0].float()).to(view.dtype)
    assert largest(sources, destination) < 0.1


def test_what_nobody_can_hold_it_to_does_not_count() -> None:
    """Where this engine computed no number itself, the other's is neither right nor wrong."""
    sources, (destination,) = pair(Setup(), Setup())
    destination.view(0, Part.KEY)[:, 0, 0] = math.nan
    assert largest(sources, destination) == 0


def test_pages_that_cannot_be_looked_into_are_not_compared() -> None:
    sources, (destination,) = pair(Setup(), Setup())
    ((route, chunk, _), *_) = compared(sources, destination)
    opaque = replace(route, source=_opaque(route.source), destination=_opaque(route.destination))
    payload = memoryview(bytes(chunk.nbytes(opaque)))
    assert destination.cache.compare(opaque, chunk, [0] * len(chunk.pages(16)), payload) == []


def _opaque(group: object) -> object:
    import msgspec

    return msgspec.structs.replace(group, dtype="nvfp4")  # type: ignore[type-var]


def test_a_tolerance_is_wider_for_what_is_rounded_more() -> None:
    exact = tolerance("float32", "float32", "raw")
    half = tolerance("bfloat16", "float32", "raw")
    fp8 = tolerance("fp8_e4m3", "bfloat16", "raw")
    assert exact < half < fp8
    assert tolerance("bfloat16", "bfloat16", "fp8_e4m3") == fp8
    for one, two in itertools.product([*DTYPES], repeat=2):
        for codec in CODECS:
            allowed = tolerance(one, two, codec)
            assert isinstance(allowed, Tolerance)
            assert allowed.layer < 1 / 3, (
                "weights that are scaled by 1.5 are seen in both directions"
            )
            assert allowed.page < 0.5
