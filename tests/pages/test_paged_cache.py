# SPDX-License-Identifier: Apache-2.0
"""What is gathered on one side and scattered on the other is the same KV, and nothing else moves.

Where each element lies is told by `support.caches`, element by element; no view is trusted.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.caches import LAYOUTS, Rank, everything
from support.filled import (
    CODECS,
    LAYERS,
    Dense,
    bits,
    converted,
    element,
    fill,
    gathered,
    ranks,
    setups,
    snapshot,
    spans,
)
from support.setups import Layer, Model, Setup
from torch.utils._python_dispatch import TorchDispatchMode

from pd_connector.codec import DTYPES
from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import pages_for
from pd_connector.pages.copiers import HostCopier, TorchCopier
from pd_connector.pages.paged_cache import LayerPages, PagedCache
from pd_connector.pages.spans import TokenSpan
from pd_connector.plan.chunks import Chunk, plan
from pd_connector.plan.route import Route, routes
from pd_connector.plan.sizes import page_part_bytes

Send = Callable[[Rank, Route, Chunk], memoryview]


def move(
    sources: list[Rank],
    destination: Rank,
    span: tuple[int, int],
    codecs: tuple[str, ...] = ("raw",),
    send: Send = gathered,
    room: int = 3,
) -> set[bool]:
    """All chunks from all ranks; returns whether some passed as whole pages, or as tokens."""
    ways = set()
    for source in sources:
        paths = routes(source.geometry, destination.geometry, codecs, codecs)
        chunk_bytes = max((page_part_bytes(route) + 4096 for route in paths), default=1) * room
        for chunk in plan(paths, *span, chunk_bytes):
            route = paths[chunk.route]
            pages = destination.pages(route.destination, chunk.pages(route.destination.page_size))
            payload = send(source, route, chunk).toreadonly()
            destination.cache.scatter(route, chunk, pages, payload)
            ways.add(chunk.verbatim)
    return ways


def wanted_from(rank: Rank, layer: int, span: tuple[int, int]) -> int:
    window = rank.groups[layer].window
    return max(span[0], span[1] - window + 1) if window else span[0]


def assert_untouched(rank: Rank, before: dict[int, torch.Tensor], span: tuple[int, int]) -> None:
    """Every byte that is not of a wanted token is what it was; where whole pages passed, the
    tokens that share the first and the last page with them may have come along."""
    for layer, storage in rank.storage.items():
        size = rank.groups[layer].page_size
        first = wanted_from(rank, layer, span) // size * size
        allowed = torch.zeros(len(storage), dtype=torch.bool)
        for token in range(max(first, span[0]), pages_for(span[1], size) * size):
            for head, v in itertools.product(
                rank.geometry.heads(rank.groups[layer]), rank.parts(layer)
            ):
                allowed[torch.tensor(rank.places(layer, head, token, v))] = True
        changed = bits(storage.cpu()) != bits(before[layer].cpu())
        assert not (changed & ~allowed).any(), f"layer {layer}: a byte of someone else's"


def assert_same(rank: Rank, dense: Dense, span: tuple[int, int]) -> None:
    for key in everything(rank, range(*span)):
        if key[2] >= wanted_from(rank, key[0], span):
            assert torch.equal(bits(element(rank, key).cpu()), bits(dense[key])), key


@pytest.mark.parametrize("by_torch", [False, True], ids=["by numpy", "as on a GPU"])
@given(st.data(), LAYERS, spans(), st.sampled_from(list(DTYPES)), st.integers(0, 1000))
@settings(max_examples=80)
def test_between_any_two_layouts_every_element_arrives_bit_by_bit(
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
    dense = fill(sources, span[1], seed, spread=False)
    destinations = ranks(model, theirs, span[1], seed + 1)
    for rank in (*sources, *destinations):
        rank.cache._copies.copier = TorchCopier() if by_torch else HostCopier()
    for destination in destinations:
        before = snapshot(destination)
        ways = move(sources, destination, span, room=data.draw(st.integers(1, 4)))
        event(f"whole pages: {True in ways}")
        assert_same(destination, dense, span)
        assert_untouched(destination, before, span)


@pytest.mark.parametrize("ours", list(DTYPES))
@pytest.mark.parametrize("theirs", list(DTYPES))
@pytest.mark.parametrize("layout", ["packed", "NHD", "tiled"])
def test_a_cache_of_another_dtype_gets_what_converting_each_element_gives(
    ours: str, theirs: str, layout: str
) -> None:
    """In `raw`, which for an FP8 cache behind a float cache is that cache's own codes."""
    model, span = (Layer(2),) * 2, (5, 50)
    source_setup = Setup(dtype=ours, scales=(0.5, 2.0))
    setup = Setup(tp=2, dtype=theirs, layout=layout, page_sizes=(32,), scales=(0.25, 1.0))
    sources = ranks(model, source_setup, 50, 1)
    dense = fill(sources, 50, 2, spread=True)
    expected = {key: converted(x, source_setup, setup, key[3]) for key, x in dense.items()}
    for destination in ranks(model, setup, 50, 3):
        before = snapshot(destination)
        move(sources, destination, span)
        assert_same(destination, expected, span)
        assert_untouched(destination, before, span)


@pytest.mark.parametrize(("codec", "wanted"), [("fp8_e4m3", 2.0**-4), ("int8", 1 / 254 + 2.0**-7)])
@pytest.mark.parametrize("theirs", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["packed", "tiled"])
def test_a_lossy_codec_keeps_every_element_within_its_bound(
    codec: str, wanted: float, theirs: str, layout: str
) -> None:
    """FP8 is off by 1/16 of the element (half a step of three bits) or less; INT8 by half a step
    of its group, whose scale is rounded up to bfloat16, and by the rounding of the result."""
    model, span = (Layer(4, 16, 16),) * 2, (3, 150)
    sources = ranks(model, Setup(tp=2, layout=layout), 150, 1)
    dense = fill(sources, 150, 2, spread=True)
    largest = max(float(x.float().abs().max()) for x in dense.values())
    (destination,) = ranks(model, Setup(layout="NHD", dtype=theirs), 150, 3)
    before = snapshot(destination)
    move(sources, destination, span, (codec, "raw"), room=40)
    assert_untouched(destination, before, span)
    differs = 0
    for key in everything(destination, range(*span)):
        exact, got = dense[key].double(), element(destination, key).double()
        bound = wanted * (exact.abs() if codec == "fp8_e4m3" else torch.tensor(largest))
        assert ((got - exact).abs() <= bound + 1e-4).all(), key
        differs += int((got != exact).sum())
    assert differs, "the codec was used"


def test_an_in_place_payload_is_the_one_that_gather_gives() -> None:
    """One run of full pages of one layer, of all heads of a rank."""
    (source,) = ranks((Layer(2),) * 2, Setup(), 64, 1)
    (route,) = routes(source.geometry, source.geometry, ("raw",), ("raw",))
    chunk = Chunk(0, 0, 1, 2, 0, 48, True)
    slot = memoryview(bytearray(chunk.nbytes(route)))
    in_place = source.cache.in_place(route, chunk, [1, 2, 3])
    assert in_place is not None
    assert bytes(in_place) == bytes(source.cache.gather(route, chunk, [1, 2, 3], slot))


@pytest.mark.parametrize(
    ("layout", "tp", "chunk", "pages"),
    [
        ("HND", 1, Chunk(0, 0, 1, 2, 0, 48, True), [1, 3, 2]),
        ("HND", 1, Chunk(0, 0, 1, 2, 0, 47, True), [1, 2, 3]),
        ("HND", 1, Chunk(0, 0, 0, 2, 0, 48, True), [1, 2, 3]),
        ("HND", 1, Chunk(0, 0, 1, 2, 0, 48, False), [1, 2, 3]),
        ("HND", 2, Chunk(0, 0, 1, 2, 0, 48, True), [1, 2, 3]),
        ("apart", 1, Chunk(0, 0, 1, 2, 0, 48, True), [1, 2, 3]),
    ],
    ids=["no run", "last page not full", "two layers", "not whole pages", "one head", "gaps"],
)
def test_what_is_not_one_run_is_not_sent_in_place(
    layout: str, tp: int, chunk: Chunk, pages: list[int]
) -> None:
    (source,) = ranks((Layer(2),) * 2, Setup(layout=layout), 64, 1)
    theirs = Setup(tp=tp, layout=layout).geometries((Layer(2),) * 2)[0]
    (route,) = routes(source.geometry, theirs, ("raw",), ("raw",))
    assert source.cache.in_place(route, chunk, pages) is None


def wrong_pages(rank: Rank, route: Route, chunk: Chunk) -> memoryview:
    pages = rank.pages(route.source, chunk.pages(route.source.page_size))
    slot = memoryview(bytearray(chunk.nbytes(route)))
    return rank.cache.gather(route, chunk, [pages[-1], *pages[1:-1], pages[0]], slot)


def wrong_head(rank: Rank, route: Route, chunk: Chunk) -> memoryview:
    flipped = replace(route, source_head=1 - route.source_head)
    pages = rank.pages(route.source, chunk.pages(route.source.page_size))
    return rank.cache.gather(flipped, chunk, pages, memoryview(bytearray(chunk.nbytes(route))))


def wrong_tokens(rank: Rank, route: Route, chunk: Chunk) -> memoryview:
    late = chunk._replace(first_token=chunk.first_token + 1, stop_token=chunk.stop_token + 1)
    pages = rank.pages(route.source, chunk.pages(route.source.page_size))
    return rank.cache.gather(route, late, pages, memoryview(bytearray(chunk.nbytes(route))))


@pytest.mark.parametrize("send", [wrong_pages, wrong_head, wrong_tokens])
def test_a_gather_that_goes_wrong_is_seen_by_these_comparisons(send: Send) -> None:
    model, setup = (Layer(2),), Setup(page_sizes=(32,))
    sources = ranks(model, setup, 63, 1)
    dense = fill(sources, 63, 2, spread=False)
    destination = ranks(model, Setup(tp=2, layout="NHD"), 63, 3)[0]
    move(sources, destination, (0, 63), send=gathered, room=8)
    assert_same(destination, dense, (0, 63))
    move(sources, destination, (0, 63), send=send, room=8)
    with pytest.raises(AssertionError):
        assert_same(destination, dense, (0, 63))


def test_a_byte_in_someone_elses_page_is_seen_by_these_comparisons() -> None:
    (rank,) = ranks((Layer(2),), Setup(layout="apart"), 40, 1)
    before = snapshot(rank)
    assert_untouched(rank, before, (0, 40))
    spare = next(page for page in range(5) if page not in rank.tables[0])
    where = LAYOUTS["apart"].place(rank.shapes[0], spare, 1, 3, 0, v=True)
    bits(rank.storage[0])[where] ^= 1
    with pytest.raises(AssertionError, match="someone else's"):
        assert_untouched(rank, before, (0, 40))


@pytest.mark.parametrize("layout", ["HND", "NHD", "packed", "tiled"])
@pytest.mark.parametrize("page", [-1, 5, 2**40])
def test_a_page_that_does_not_exist_is_an_error_and_nothing_is_touched(
    page: int, layout: str
) -> None:
    """Both where whole pages pass and where tokens do."""
    (rank,) = ranks((Layer(2),), Setup(layout=layout), 48, 1)
    before = snapshot(rank)
    (route,) = routes(rank.geometry, rank.geometry, ("raw",), ("raw",))
    for chunk in (Chunk(0, 0, 0, 1, 0, 48, True), Chunk(0, 0, 0, 1, 0, 48, False)):
        slot = memoryview(bytearray(chunk.nbytes(route)))
        for pages in ([page, 1, 2], [0, 1, page]):
            with pytest.raises(IndexError, match="cache of 5"):
                rank.cache.gather(route, chunk, pages, slot)
            with pytest.raises(IndexError, match="cache of 5"):
                rank.cache.scatter(route, chunk, pages, slot)
        assert not any(slot)
    assert torch.equal(bits(rank.storage[0]), bits(before[0]))


@pytest.mark.parametrize("verbatim", [True, False])
@pytest.mark.parametrize("codec", ["raw", "int8", "fp8_e4m3"])
def test_a_payload_of_another_size_is_an_error_and_nothing_is_touched(
    verbatim: bool, codec: str
) -> None:
    (rank,) = ranks((Layer(2),), Setup(), 48, 1)
    before = snapshot(rank)
    (route,) = routes(rank.geometry, rank.geometry, (codec,), (codec,))
    chunk = Chunk(0, 0, 0, 1, 0, 48, verbatim)
    right = chunk.nbytes(route)
    for size in (right - 1, right + 1, 0):
        with pytest.raises(ValueError, match=f"payload of {size} bytes: the chunk has {right}"):
            rank.cache.scatter(route, chunk, [0, 1, 2], memoryview(bytes(size)))
    with pytest.raises(ValueError, match=f"slot of {right - 1} bytes: the chunk has {right}"):
        rank.cache.gather(route, chunk, [0, 1, 2], memoryview(bytearray(right - 1)))
    assert torch.equal(bits(rank.storage[0]), bits(before[0]))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("theirs", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_received_buffer_may_be_read_only_and_odd_in_memory(
    dtype: str, theirs: str, codec: str
) -> None:
    (source,) = ranks((Layer(2, 3, 3),), Setup(dtype=dtype), 40, 1)
    fill([source], 40, 2, spread=True)
    one, two = ranks((Layer(2, 3, 3),) * 1, Setup(dtype=theirs), 40, 3) * 2
    move([source], one, (1, 40), (codec, "raw"))
    kept = snapshot(one)

    def odd(rank: Rank, route: Route, chunk: Chunk) -> memoryview:
        return memoryview(b"x" + bytes(gathered(rank, route, chunk)))[1:]

    move([source], two, (1, 40), (codec, "raw"), send=odd)
    assert torch.equal(bits(two.storage[0]), bits(kept[0]))


def test_pages_that_nobody_can_read_pass_as_they_are() -> None:
    """Bytes that only their owner knows more of: by page and, where heads lie apart, by head."""
    model = (Layer(2, 9, 0),)
    setups = Setup(layout="HND"), Setup(layout="HND", tp=2)
    geometries = [
        msgspec.structs.replace(
            geometry,
            groups=(msgspec.structs.replace(geometry.groups[0], dtype="nvfp4"),),
        )
        for geometry in (setups[0].geometries(model)[0], setups[1].geometries(model)[1])
    ]
    (route,) = routes(*geometries, ("raw",), ("raw",))
    full, half = (torch.randint(0, 256, (4, heads, 16, 9), dtype=torch.uint8) for heads in (2, 1))
    wanted = half.clone()
    wanted[[3, 0]] = full[[1, 2], 1:]
    caches = [
        PagedCache({0: LayerPages(x, None, (x.flatten(2),))}, geometry)
        for x, geometry in zip((full, half), geometries, strict=True)
    ]
    chunk = Chunk(0, 0, 0, 1, 0, 30, True)
    slot = memoryview(bytearray(chunk.nbytes(route)))
    caches[1].scatter(route, chunk, [3, 0], caches[0].gather(route, chunk, [1, 2], slot))
    assert torch.equal(half, wanted)


@pytest.mark.parametrize(
    ("shape", "dtype", "rows", "told"),
    [
        ((5, 2, 16, 8), torch.bfloat16, (5, 2, 512), ""),
        ((5, 3, 16, 8), torch.bfloat16, (5, 3, 512), "shape.*5, 3, 16, 8.*2 heads"),
        ((5, 2, 24, 8), torch.bfloat16, (5, 2, 768), "tokens that divide 16"),
        ((5, 2, 16, 4), torch.bfloat16, (5, 2, 256), "16, 4.*8] of bfloat16"),
        ((5, 2, 16, 8), torch.float16, (5, 2, 512), "float16: wanted"),
        ((5, 2, 16, 8), torch.bfloat16, (5, 2, 256), "planes of .*5, 2, 256.*512"),
        ((5, 2, 16, 8), torch.bfloat16, (5, 1, 1024), "planes of .*5, 1, 1024"),
        ((5, 2, 16, 8), torch.bfloat16, (4, 2, 512), "planes of .*4, 2, 512"),
        ((5, 2, 16, 8), torch.bfloat16, None, "layout HND.*not dense"),
    ],
)
def test_a_cache_that_is_not_what_the_geometry_says_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, rows: tuple[int, ...] | None, told: str
) -> None:
    (geometry,) = Setup().geometries((Layer(2),))
    half = torch.zeros(shape, dtype=dtype)
    dense = () if rows is None else (torch.zeros(rows, dtype=torch.uint8),)
    if not told:
        PagedCache({0: LayerPages(half, half, dense)}, geometry)
        return
    with pytest.raises(UnsupportedGeometryError, match=told):
        PagedCache({0: LayerPages(half, half, dense)}, geometry)


def test_a_layer_without_v_where_the_geometry_has_one_is_refused() -> None:
    (geometry,) = Setup(layout="").geometries((Layer(2),))
    half = torch.zeros(5, 2, 16, 8, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedGeometryError, match="layer 0 has no V"):
        PagedCache({0: LayerPages(half, None, ())}, geometry)


class Dtypes(TorchDispatchMode):
    """Remembers what torch's operations were called with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        self.found |= {(name, x.dtype) for x in args if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def test_torch_moves_fp8_as_integers() -> None:
    """Some of its operations do not exist for FP8 on a GPU."""
    view = torch.randn(6, 2, 16, 8).to(torch.float8_e4m3fn)
    pages = TokenSpan((4, 1), 3, 30, 16, 16)
    plane, other = torch.zeros(2, 27, 8).to(view.dtype), torch.zeros_like(view)
    copier = TorchCopier()
    with Dtypes() as dtypes:
        copier.read(view, pages, plane)
        copier.write(other, pages, plane)
    moved = {dtype for name, dtype in dtypes.found if name in ("index_select", "copy_")}
    assert torch.int8 in moved
    assert view.dtype not in moved
    for page, tokens in ((4, slice(3, 16)), (1, slice(0, 14))):
        assert torch.equal(other[page, :, tokens].float(), view[page, :, tokens].float())
    assert not other[4, :, :3].float().any()


def test_a_fence_is_asked_only_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    (rank,) = ranks((Layer(2),), Setup(), 60, 1)
    under_way, done = (SimpleNamespace(query=lambda found=found: found) for found in (0, 1))
    assert rank.cache.happened(under_way)
    monkeypatch.setattr(rank.cache, "_stream", "of a device")
    assert rank.cache.happened(done)
    assert not rank.cache.happened(under_way)
    assert rank.cache.happened(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_fence_has_happened_when_what_was_queued_before_it_is_done() -> None:
    (rank,) = ranks((Layer(2),), Setup(), 60, 1, "cuda")
    torch.cuda._sleep(1 << 29)  # cycles: 0.3 s
    fence = rank.cache.fence()
    assert not rank.cache.happened(fence)
    torch.cuda.synchronize()
    assert rank.cache.happened(fence)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("theirs", ["HND", "NHD", "packed", ""])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_pages_of_a_gpu_go_through_host_slots(theirs: str, dtype: str) -> None:
    model, span = (Layer(2), Layer(4, window=20)), (5, 60)
    sources = ranks(model, Setup(tp=2, dtype=dtype), 60, 1, "cuda")
    dense = fill(sources, 60, 2, spread=False)
    for first in (5, 32):
        span = first, 60
        for destination in ranks(model, Setup(layout=theirs, dtype=dtype), 60, 3, "cuda"):
            before = snapshot(destination)
            move(sources, destination, span)
            assert_same(destination, dense, span)
            assert_untouched(destination, before, span)
