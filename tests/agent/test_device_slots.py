# SPDX-License-Identifier: Apache-2.0
"""Whole transfers between slots in device memory, over NIXL's real library. Host memory stands for a device's, and
the kernels' references for the kernels; on a GPU the same transfers run with both.
"""

from typing import Any

import pytest
import torch
from support import agents
from support.agents import LONG, Rank, Ranks, assert_pages, ranks

from pd_connector.agent.producing import send_pipeline as send_pipeline
from pd_connector.errors import Cause, ConfigError
from pd_connector.memory import slot_memory
from pd_connector.memory.device_bytes import DeviceBytes
from pd_connector.memory.device_slab import DeviceMemoryError
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.wire.peers import Peer

pytest.importorskip("nixl._api", reason="nixl cannot be imported")
pytest.importorskip("triton")
__all__ = ["ranks"]

pytestmark = pytest.mark.timeout(300)

NIXL = LONG | {"transports": ("nixl",)}
PAGES, INTO = [5, 3, 17, 0, 9], [20, 1, 7, 2, 13]


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches made from now on have a device that slots can lie on."""

    def make(*what: Any) -> PagedCache:
        return PagedCache(*what, by_kernels=True)

    monkeypatch.setattr(agents, "PagedCache", make)


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The kind of each payload that was posted."""
    kinds: list[type] = []
    write, leave = send_pipeline.SendPipeline._write, send_pipeline.SendPipeline._leave

    def seen_write(pipeline: Any, chunk: Any, payload: Any, *rest: Any) -> Any:
        kinds.append(type(payload))
        return write(pipeline, chunk, payload, *rest)

    def seen_leave(pipeline: Any, chunk: Any, payload: Any) -> Any:
        kinds.append(type(payload))
        return leave(pipeline, chunk, payload)

    monkeypatch.setattr(send_pipeline.SendPipeline, "_write", seen_write)
    monkeypatch.setattr(send_pipeline.SendPipeline, "_leave", seen_leave)
    return kinds


def transfer(producer: Rank, consumer: Rank, name: str = "t", **options: Any) -> Cause | None:
    producer.offer(name, PAGES)
    consumer.load(producer.source, name, INTO, **options)
    return consumer.loaded(name).cause


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("direction", ["write", "read"])
def test_chunks_pass_from_device_to_device(
    ranks: Ranks,
    posted: list[type],
    direction: str,
) -> None:
    producer, consumer = ranks.pair(NIXL | {"direction": direction})
    for name in ("a", "b"):
        assert transfer(producer, consumer, name) is None
        assert_pages(producer, PAGES, consumer, INTO)
    assert set(posted) == {DeviceBytes}
    assert producer.agent.transports == "nixl; slots in device memory"
    assert (producer.gauge("device_slots"), consumer.gauge("device_slots")) == (4, 4)
    assert producer.count("staged_sessions", cause="peer") == 0


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize(
    ("ours", "theirs", "cause"),
    [
        ({"transports": ("nixl",), "slot_memory": "host"}, {"transports": ("nixl",)}, "config"),
        ({"transports": ("nixl",)}, {"transports": ("nixl",), "slot_memory": "host"}, "peer"),
        ({"transports": ("tcp",)}, {"transports": ("tcp",)}, "transport"),
        ({"transports": ("nixl", "tcp")}, {"transports": ("tcp",)}, "transport"),
    ],
)
def test_where_device_slots_cannot_be_used_host_slots_are_and_a_metric_says_why(
    ranks: Ranks,
    posted: list[type],
    ours: dict[str, Any],
    theirs: dict[str, Any],
    cause: str,
) -> None:
    producer = ranks(LONG | ours, consumes=False)
    consumer = ranks(LONG | theirs, seed=1, produces=False)
    assert transfer(producer, consumer) is None
    assert_pages(producer, PAGES, consumer, INTO)
    assert set(posted) == {memoryview}
    assert producer.count("staged_sessions", cause=cause) == 1
    if producer.gauge("device_slots") == 0:
        assert f"slots in host memory ({cause}: " in producer.agent.transports


def test_a_cache_in_host_memory_says_nothing_of_devices(ranks: Ranks, posted: list[type]) -> None:
    producer, consumer = ranks.pair(NIXL)
    assert transfer(producer, consumer) is None
    assert set(posted) == {memoryview}
    assert producer.agent.transports == "nixl"
    assert not [name for name, _ in producer.counts if name == "staged_sessions"]
    with pytest.raises(ConfigError, match="the cache is in host memory"):
        ranks(NIXL | {"slot_memory": "device"})


@pytest.mark.usefixtures("by_kernels")
def test_a_device_without_room_leaves_slots_in_host_memory(
    ranks: Ranks,
    posted: list[type],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise DeviceMemoryError("4 MiB are free")

    monkeypatch.setattr(slot_memory, "DeviceSlab", full)
    producer, consumer = ranks.pair(NIXL)
    assert transfer(producer, consumer) is None
    assert set(posted) == {memoryview}
    assert producer.agent.transports == "nixl; slots in host memory (memory: 4 MiB are free)"
    assert producer.count("staged_sessions", cause="memory") == 1
    with pytest.raises(ConfigError, match=r"slot_memory 'device': 4 MiB are free\. Set `auto`"):
        ranks(NIXL | {"slot_memory": "device"})


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("where", ["send slot", "landing slot"])
def test_a_payload_that_changes_in_a_device_slot_is_noticed(
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """After it was summed, and before it is scattered."""
    producer, consumer = ranks.pair(NIXL)
    side = producer if where == "send slot" else consumer
    damage(side, monkeypatch)
    assert transfer(producer, consumer) is Cause.CHECKSUM


def damage(side: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = side.cache
    gather, scatter = cache.gather, cache.scatter

    def damaged(payload: Any) -> None:
        assert isinstance(payload, DeviceBytes)
        payload.tensor[100] ^= 4

    def after(*where: Any) -> Any:
        payload = gather(*where)
        damaged(payload)
        return payload

    def before(route: Any, chunk: Any, pages: Any, payload: Any, fence: Any) -> None:
        damaged(payload)
        scatter(route, chunk, pages, payload, fence)

    monkeypatch.setattr(cache, "gather", after)
    monkeypatch.setattr(cache, "scatter", before)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("damages", [False, True])
def test_what_no_kernel_takes_goes_through_host_memory_and_is_summed_there(
    ranks: Ranks,
    posted: list[type],
    monkeypatch: pytest.MonkeyPatch,
    damages: bool,
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("stride of 2147483648 bytes")

    monkeypatch.setattr("pd_kernels.transfer.Planes.of", refuse)
    monkeypatch.setattr("pd_kernels.transfer.Planes.of_rows", refuse)
    producer, consumer = ranks.pair(NIXL)
    if damages:
        damage(consumer, monkeypatch)
    assert transfer(producer, consumer) is (Cause.CHECKSUM if damages else None)
    assert set(posted) == {DeviceBytes}
    if not damages:
        assert_pages(producer, PAGES, consumer, INTO)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("damages", [False, True])
def test_an_audit_compares_what_landed_on_the_device(
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    damages: bool,
) -> None:
    producer, consumer = ranks.pair(NIXL)
    for rank in (producer, consumer):  # numbers, not bits
        random = torch.Generator().manual_seed(3)
        for layer in rank.layers.values():
            layer.copy_(torch.randn(layer.shape, generator=random))
    if damages:
        cache = consumer.cache
        compare = cache.compare

        def damaged(route: Any, chunk: Any, pages: Any, payload: Any, fence: Any) -> Any:
            payload.tensor[100] ^= 4
            return compare(route, chunk, pages, payload, fence)

        monkeypatch.setattr(cache, "compare", damaged)
    producer.offer("t", PAGES)
    peers = (Peer(producer.source, producer.geometry.shard),)
    stop = len(PAGES) * producer.page_tokens
    load = Load("load of t", "t", peers, agents.TOKENS, 0, stop, (PAGES,), False, compares=True)
    consumer.agent.submit(load)
    ended = consumer.loaded("t")
    assert ended.cause is (Cause.CHECKSUM if damages else None), ended
