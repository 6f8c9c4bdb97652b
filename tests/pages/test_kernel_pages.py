# SPDX-License-Identifier: Apache-2.0
"""Pages that kernels move: the same payloads, checksums and pages as on the host's path.

On CPU the operators run their references in torch; that the kernels equal these is tested in
tests/kernels, and on a GPU by `python -m pd_bench.kernels transfer`.
"""

import contextlib
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agents import LONG, TRANSPORTS, Rank, Ranks, assert_pages, geometry_of, ranks
from support.caches import LAYOUTS
from support.caches import Rank as CacheRank
from support.setups import LATENT, Layer, Model, Setup

from pd_connector.agent.consuming import receive_pipeline
from pd_connector.agent.producing import send_pipeline
from pd_connector.codec import DTYPES
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Shard
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.plan.chunks import Chunk, plan
from pd_connector.plan.route import Route, routes
from pd_connector.plan.sizes import page_part_bytes
from pd_kernels.checksum import checksum_of

pytest.importorskip("triton")
__all__ = ["ranks"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
LAYERS: tuple[Model, ...] = (
    (Layer(2),) * 2,
    (Layer(4, 8, 8), Layer(2, 4, 4, window=20), Layer(4, 8, 8)),
    (Layer(1, 3, 3),),
    (LATENT,) * 3,
)


def by_kernels(rank: CacheRank) -> PagedCache:
    """The same memory, moved by the operators."""
    return PagedCache(rank.views, rank.geometry, by_kernels=True)


def rank_of(model: Model, setup: Setup, tokens: int, seed: int, device: str = "cpu") -> CacheRank:
    """The last rank of a setup, with ordinary numbers in its pages: of one seed, the same ones."""
    rank = CacheRank(setup.geometries(model)[-1], tokens, random.Random(seed), device)
    numbers = torch.Generator().manual_seed(seed)
    for storage in rank.storage.values():
        storage.copy_(torch.randn(storage.shape, generator=numbers).to(storage.dtype))
    return rank


def gathered(cache: PagedCache, rank: CacheRank, route: Route, chunk: Chunk) -> bytes:
    pages = rank.pages(route.source, chunk.pages(route.source.page_size))
    slot = memoryview(bytearray(b"x" * (chunk.nbytes(route) + 5)))
    filled = cache.gather(route, chunk, pages, slot)
    assert bytes(slot[len(filled) :]) == b"x" * 5, "nothing behind the chunk is written"
    return bytes(filled)


def scattered(cache: PagedCache, rank: CacheRank, route: Route, chunk: Chunk, payload: bytes):
    pages = rank.pages(route.destination, chunk.pages(route.destination.page_size))
    odd = memoryview(b"x" + payload)[1:]  # read-only, at an odd address
    cache.scatter(route, chunk, pages, odd)


def same_both_ways(
    model: Model,
    ours: Setup,
    theirs: Setup,
    codec: str,
    span: tuple[int, int],
    room: int = 3,
    where: str = "cpu",
) -> set[bool]:
    """Every chunk by both paths; returns whether some were whole pages, or tokens.

    Args:
        where: the device of the caches that the operators move.
    """
    source, twin = (rank_of(model, ours, span[1], 1, device) for device in ("cpu", where))
    host, device = (rank_of(model, theirs, span[1], 2, device) for device in ("cpu", where))
    sending, landing = by_kernels(twin), by_kernels(device)
    paths = routes(source.geometry, host.geometry, (codec, "raw"), (codec, "raw"))
    ways = set()
    slot_bytes = max((page_part_bytes(route) + 4096 for route in paths), default=1) * room
    for chunk in plan(paths, *span, slot_bytes):
        route = paths[chunk.route]
        payload = gathered(source.cache, source, route, chunk)
        assert source.cache.last_checksum is None, "a host's caller sums by itself"
        assert gathered(sending, twin, route, chunk) == payload
        assert sending.last_checksum == checksum_of(memoryview(payload))
        scattered(host.cache, host, route, chunk, payload)
        scattered(landing, device, route, chunk, payload)
        assert landing.last_checksum == sending.last_checksum
        ways.add(chunk.verbatim)
    for layer, storage in host.storage.items():
        bits = BITS[storage.element_size()]
        assert torch.equal(device.storage[layer].cpu().view(bits), storage.view(bits)), layer
    return ways


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("theirs", LAYOUTS)
def test_any_two_layouts_give_the_payloads_and_pages_of_the_host(layout: str, theirs: str) -> None:
    """A range that begins and ends within pages, from one page size to another."""
    ways = set()
    for model, span in zip(LAYERS, [(5, 70), (0, 64), (17, 33), (0, 41)], strict=True):
        latent = model[0].kind == "latent"
        if latent and ("packed" in layout + theirs or "" in (layout, theirs)):
            continue
        ours, other = Setup(layout=layout), Setup(layout=theirs, page_sizes=(32,))
        if layout == theirs:
            other = ours
        ways |= same_both_ways(model, ours, other, "raw", span)
    assert (True in ways) == (layout == theirs != ""), "whole pages pass between like caches"


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("theirs", list(DTYPES))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_any_dtypes_and_codec_give_the_payloads_and_pages_of_the_host(
    dtype: str, theirs: str, codec: str
) -> None:
    """With a producer's two heads shared by two ranks of the consumer, and scales of both."""
    ours = Setup(dtype=dtype, scales=(0.5, 2.0))
    other = Setup(tp=2, dtype=theirs, layout="NHD in parts", page_sizes=(32,), scales=(0.25, 0.37))
    same_both_ways((Layer(2, 16, 16),) * 2, ours, other, codec, (3, 150), room=20)


@given(st.data(), st.sampled_from(LAYERS), st.sampled_from(list(DTYPES)))
@settings(max_examples=15)
def test_what_random_engines_exchange_is_the_same_on_both_paths(
    data: st.DataObject, model: Model, dtype: str
) -> None:
    layouts = ["HND", "HND in parts", "apart"] if model[0].kind == "latent" else list(LAYOUTS)
    made = [
        Setup(
            tp=data.draw(st.sampled_from([1, 2])),
            labels=(0,) * len(model),
            page_sizes=(data.draw(st.sampled_from([16, 32])),),
            layout=data.draw(st.sampled_from(layouts)),
            dtype=dtype,
        )
        for _ in range(2)
    ]
    stop = data.draw(st.integers(1, 70))
    span = data.draw(st.integers(0, stop - 1)), stop
    same_both_ways(model, *made, data.draw(st.sampled_from(["raw", "int8"])), span)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("codec", ["raw", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("theirs", list(DTYPES))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_gpu_s_kernels_give_the_payloads_checksums_and_pages_of_the_host(
    dtype: str, theirs: str, codec: str
) -> None:
    """All of it by kernels: a chunk that they left to torch would have no checksum."""
    ours = Setup(dtype=dtype, scales=(0.5, 2.0))
    for model in ((Layer(2, 32, 16),) * 2, (Layer(1, 48, 0, kind="latent"),) * 3):
        tp = model[0].heads
        other = Setup(tp=tp, dtype=theirs, page_sizes=(32,), layout="apart", scales=(0.25, 0.37))
        for setup in (ours, other):
            same_both_ways(model, ours, setup, codec, (3, 150), room=20, where="cuda")


def one_chunk() -> tuple[CacheRank, PagedCache, Route, Chunk]:
    rank = rank_of((Layer(2),) * 2, Setup(), 48, 1)
    (route,) = routes(rank.geometry, rank.geometry, ("raw",), ("raw",))
    return rank, by_kernels(rank), route, Chunk(0, 0, 0, 2, 0, 48, False)


def test_another_page_gives_another_checksum() -> None:
    _, cache, route, chunk = one_chunk()
    slot = memoryview(bytearray(chunk.nbytes(route)))
    found = set()
    for pages in ([0, 1, 2], [0, 2, 1], [0, 1, 3]):
        cache.gather(route, chunk, pages, slot)
        found.add(cache.last_checksum)
    assert len(found) == 3


def test_a_damaged_payload_gives_another_checksum() -> None:
    _, cache, route, chunk = one_chunk()
    slot = memoryview(bytearray(chunk.nbytes(route)))
    cache.gather(route, chunk, [0, 1, 2], slot)
    sent = cache.last_checksum
    cache.scatter(route, chunk, [2, 3, 4], slot)
    assert cache.last_checksum == sent
    slot[777] ^= 1
    cache.scatter(route, chunk, [2, 3, 4], slot)
    assert cache.last_checksum not in (None, sent)


@pytest.mark.parametrize("verbatim", [True, False])
@pytest.mark.parametrize("page", [-1, 5, 2**40])
def test_a_page_that_does_not_exist_never_reaches_a_kernel(page: int, verbatim: bool) -> None:
    rank, cache, route, chunk = one_chunk()
    chunk = chunk._replace(verbatim=verbatim)
    before = {layer: storage.clone() for layer, storage in rank.storage.items()}
    slot = memoryview(bytearray(chunk.nbytes(route)))
    for pages in ([page, 1, 2], [0, 1, page]):
        with pytest.raises(IndexError, match="cache of 5"):
            cache.gather(route, chunk, pages, slot)
        with pytest.raises(IndexError, match="cache of 5"):
            cache.scatter(route, chunk, pages, slot)
    assert not any(slot)
    assert all(torch.equal(rank.storage[layer], x) for layer, x in before.items())


def test_what_no_kernel_takes_goes_the_other_way_and_the_caller_sums(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*what: object) -> None:
        raise ValueError("stride of 2147483648 bytes")

    monkeypatch.setattr("pd_kernels.transfer.Planes.of", refuse)
    rank, cache, route, chunk = one_chunk()
    slot = memoryview(bytearray(chunk.nbytes(route)))
    cache.gather(route, chunk, [0, 1, 2], slot)
    assert cache.last_checksum is None
    other = memoryview(bytearray(chunk.nbytes(route)))
    assert bytes(slot) == bytes(rank.cache.gather(route, chunk, [0, 1, 2], other))
    cache.scatter(route, chunk, [2, 3, 4], slot)
    assert cache.last_checksum is None
    assert "kernels cannot move layers 0-1: stride" in caplog.text
    with pytest.raises(IndexError, match="cache of 5"):
        cache.gather(route, chunk, [0, 1, 5], slot)


def test_a_table_of_planes_is_made_once_for_all_chunks_of_the_same_layers() -> None:
    _, cache, route, chunk = one_chunk()
    assert cache._kernels is not None
    slot = memoryview(bytearray(chunk.nbytes(route)))
    for _ in range(3):
        cache.gather(route, chunk, [0, 1, 2], slot)
        cache.gather(route, chunk._replace(first_token=16), [1, 2], slot)
    assert cache._kernels._part.cache_info().misses == 1


def test_without_triton_a_cache_moves_its_pages_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pd_connector.pages.kernel_pages", None)
    rank, cache, route, chunk = one_chunk()
    assert "without kernels" in caplog.text
    slots = [memoryview(bytearray(chunk.nbytes(route))) for _ in range(2)]
    assert cache.gather(route, chunk, [0, 1, 2], slots[0]) == rank.cache.gather(
        route, chunk, [0, 1, 2], slots[1]
    )


class Stream:
    """Stands for a GPU's stream: records its calls in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wait_event(self, event: str) -> None:
        self.calls.append(event)

    def synchronize(self) -> None:
        self.calls.append("done")


def test_no_copy_is_under_way_when_a_call_has_ended_well_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies are queued and not waited for one by one: what has been queued before an error, too, may
    reach a slot that is lent again."""
    rank, _, route, chunk = one_chunk()
    slots = [memoryview(bytearray(chunk.nbytes(route))) for _ in range(2)]
    rank.cache.gather(route, chunk, [0, 1, 2], slots[0])
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "stream", lambda of: contextlib.nullcontext())
    monkeypatch.setattr(rank.cache, "_stream", stream)
    rank.cache.gather(route, chunk, [0, 1, 2], slots[1], "computed")  # type: ignore[arg-type]
    assert slots[1] == slots[0]
    assert stream.calls == ["computed", "done"]
    for move in (rank.cache.gather, rank.cache.scatter):
        stream.calls.clear()
        with pytest.raises(IndexError, match="cache of 5"):
            move(route, chunk, [0, 1, 5], slots[1])
        assert stream.calls == ["done"]


# Whole transfers.

SIDES = {"both": (True, True), "the producer": (True, False), "the consumer": (False, True)}


@pytest.mark.parametrize("who", SIDES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_agents_move_pages_by_kernels_on_either_side(
    ranks: Ranks, kernels_at: list[bool], transport: str, who: str
) -> None:
    kernels_at += SIDES[who]
    producer, consumer = ranks.pair(LONG | TRANSPORTS[transport])
    untouched = {page: consumer.page(page) for page in set(range(24)) - {20, 1, 7, 2, 13}}
    pages, into = [5, 3, 17, 0, 9], [20, 1, 7, 2, 13]
    producer.offer("t", pages)
    consumer.load(producer.source, "t", into)
    assert consumer.loaded("t").cause is None
    assert_pages(producer, pages, consumer, into)
    assert all(consumer.page(page) == before for page, before in untouched.items())
    assert producer.freed("t").cause is None


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8_e4m3"])
def test_the_sums_of_kernels_stand_for_the_host_s_in_every_codec(
    ranks: Ranks, kernels_at: list[bool], monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Nothing is summed on the host of either side."""
    kernels_at += SIDES["both"]

    def never(*_: object) -> bytes:
        raise AssertionError("summed on the host")

    monkeypatch.setattr(send_pipeline, "checksum_of", never)
    monkeypatch.setattr(receive_pipeline, "checksum_of", never)
    half = geometry_of(Shard(0, 2, 1, 2), layout="other", page_size=8)
    settings = LONG | {"transports": ("tcp",), "codec": codec}
    producer = ranks(settings, consumes=False)
    consumer = ranks(settings, produces=False, seed=1, geometry=half, shards=[half.shard])
    for rank in (producer, consumer):  # numbers, not bits
        for layer in rank.layers.values():
            layer.copy_(torch.randn(layer.shape))
    producer.offer("t", [1, 2, 3])
    consumer.load([producer.peer], "t", [7, 4], tokens=12)
    assert consumer.loaded("t").cause is None
    assert consumer.count("received_chunks") > 0


@pytest.mark.parametrize("who", SIDES)
def test_a_payload_that_is_damaged_on_its_way_is_noticed(
    ranks: Ranks, kernels_at: list[bool], monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    kernels_at += SIDES[who]
    producer, consumer = ranks.pair(LONG | TRANSPORTS["tcp"])
    damage(producer, monkeypatch)
    producer.offer("t", [5, 3])
    consumer.load(producer.source, "t", [20, 1])
    assert consumer.loaded("t").cause is Cause.CHECKSUM


def damage(producer: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the producer has summed is changed before it is sent."""
    write = send_pipeline.SendPipeline._write

    def damaged(pipeline, chunk, payload, *rest):
        changed = bytearray(payload)
        changed[100] ^= 4
        write(pipeline, chunk, memoryview(changed), *rest)

    monkeypatch.setattr(send_pipeline.SendPipeline, "_write", damaged)
