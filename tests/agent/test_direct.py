# SPDX-License-Identifier: Apache-2.0
"""Leased pages are read where they lie: when that is done, and what happens if it goes wrong."""

from typing import Any

import pytest
from support.agents import LONG, SHORT, Rank, Ranks, assert_pages, geometry_of, ranks, until
from support.children import Children, children, nursery
from support.faulty_transport import Corrupt, Fail, FaultPlan, FaultTransport

from pd_connector.agent.commands import Expect
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Shard
from pd_connector.memory.pieces import Pieces
from pd_connector.transport.shm.transport import ShmTransport

__all__ = ["children", "nursery", "ranks"]

DIRECT: dict[str, Any] = {"transports": ("shm",)}


def moved(ranks: Ranks, settings: dict[str, Any], here: Any, there: Any) -> float:
    """Move pages between these geometries; returns how many pieces were read where they lay."""
    producer = ranks(settings, consumes=False, geometry=here)
    consumer = ranks(settings, produces=False, seed=1, geometry=there)
    producer.offer("t", [5, 3, 17])
    consumer.load([producer.peer], "t", [2, 9, 4])
    assert consumer.loaded("t").cause is None
    assert producer.freed("t").cause is None
    return consumer.count("pulled_pieces")


def test_pages_of_like_caches_are_read_where_they_lie(ranks: Ranks):
    assert moved(ranks, LONG | DIRECT, geometry_of(), geometry_of()) == 3 * 2


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        (LONG | DIRECT | {"direction": "read"}, geometry_of()),
        (LONG | DIRECT | {"direction": "write"}, geometry_of()),
        (LONG | {"transports": ("tcp",)}, geometry_of()),
        (LONG | DIRECT, geometry_of(layout="another")),
        (LONG | DIRECT, geometry_of(page_size=8)),
    ],
    ids=["slots are wished", "written", "tcp", "another layout", "another page size"],
)
def test_elsewhere_they_pass_through_slots(ranks: Ranks, settings: dict[str, Any], there: Any):
    producer = ranks(settings, consumes=False)
    consumer = ranks(settings, produces=False, seed=1, geometry=there)
    (group,) = there.groups
    pages = [5, 3] if group.page_size == 4 else [5, 3, 17, 6]
    producer.offer("t", pages)
    consumer.load([producer.peer], "t", [2, 9])
    assert consumer.loaded("t").cause is None
    assert consumer.count("pulled_pieces") == 0


def test_heads_of_a_wider_shard_are_read_out_of_its_pages(ranks: Ranks):
    """Half of each of the producer's pages is wanted."""
    half = geometry_of(Shard(0, 2, 1, 2))
    producer = ranks(LONG | DIRECT, consumes=False)
    consumer = ranks(LONG | DIRECT, produces=False, seed=1, geometry=half, shards=(half.shard,))
    producer.offer("t", [5, 3, 17])
    consumer.load([producer.peer], "t", [2, 9, 4])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [5, 3, 17], consumer, [2, 9, 4])
    assert consumer.count("pulled_pieces") == 3 * 2


def test_pages_of_a_prefill_that_goes_on_are_not_read_where_they_lie(ranks: Ranks):
    """They may be taken back at any moment; the last ones are leased."""
    large = geometry_of(heads=1, page_size=512, key_dim=128, value_dim=128)
    producer, consumer = ranks.pair(LONG | DIRECT, geometry=large)
    producer.agent.submit(Expect("t"))
    producer.offer("t", [5, 3, 17], computed=512)
    consumer.load([producer.peer], "t", [2, 9, 4], wait=True)
    until(lambda: consumer.count("received_chunks"))
    assert consumer.count("pulled_pieces") == 0
    producer.offer("t", [5, 3, 17])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [5, 3, 17], consumer, [2, 9, 4])
    assert producer.freed("t").cause is None
    assert consumer.count("pulled_pieces") == 2 * 2


def faulty(ranks: Ranks, plan: FaultPlan) -> tuple[Rank, Rank]:
    producer = ranks(LONG | DIRECT, consumes=False)
    wrap = lambda inner: FaultTransport(inner, plan)  # noqa: E731
    return producer, ranks(LONG | DIRECT, produces=False, seed=1, wrap=wrap)


@pytest.mark.parametrize(
    ("fault", "cause"), [(Corrupt(7), Cause.CHECKSUM), (Fail(), Cause.TRANSPORT)]
)
def test_a_read_that_goes_wrong_fails_its_load_and_the_next_one_arrives(
    ranks: Ranks, fault: Corrupt | Fail, cause: Cause
):
    producer, consumer = faulty(ranks, FaultPlan(pulls={0: fault}))
    untouched = {page: consumer.page(page) for page in range(24) if page != 5}
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert consumer.loaded("t").cause is cause
    assert producer.freed("t").cause is cause
    assert {page: consumer.page(page) for page in untouched} == untouched
    producer.offer("u", [2])
    consumer.load(producer.source, "u", [6])
    assert consumer.loaded("u").cause is None
    assert_pages(producer, [2], consumer, [6])


def test_without_its_checksum_a_damaged_page_would_count(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Pieces, "checksum", lambda pieces: b"")
    producer, consumer = faulty(ranks, FaultPlan(pulls={0: Corrupt(7)}))
    producer.offer("t", [1])
    monkeypatch.setattr(ShmTransport, "pull", _unsummed(ShmTransport.pull))
    consumer.load(producer.source, "t", [5])
    assert consumer.loaded("t").cause is None
    assert consumer.page(5) != producer.page(1)


def _unsummed(pull: Any) -> Any:
    def pulled(*arguments: Any) -> bytes:
        pull(*arguments)
        return b""

    return pulled


def test_pages_whose_lease_has_ended_are_not_believed(ranks: Ranks, monkeypatch: Any):
    """The engine reuses a page between the offer and the read."""
    producer, consumer = ranks.pair(SHORT | DIRECT)
    pull = ShmTransport.pull

    def late(*arguments: Any) -> bytes:
        for layer in producer.layers.values():
            layer[1] = 0
        return pull(*arguments)

    monkeypatch.setattr(ShmTransport, "pull", late)
    producer.offer("t", [1])
    consumer.load(producer.source, "t", [5])
    assert consumer.loaded("t").cause is Cause.CHECKSUM


def forbidden(*arguments: Any) -> bytes:
    raise PermissionError(1, "Operation not permitted")


def test_where_the_kernel_forbids_it_slots_are_used(ranks: Ranks, monkeypatch: Any):
    monkeypatch.setattr("pd_connector.transport.shm.consumer_half.read_memory", forbidden)
    assert moved(ranks, LONG | DIRECT, geometry_of(), geometry_of()) == 0


def test_another_process_is_read_and_its_death_fails_the_load(ranks: Ranks, children: Children):
    settings = SHORT | DIRECT | {"session_timeout_s": 30.0, "stall_timeout_s": 30.0}
    producer = children(settings, consumes=False, seed=4)
    consumer = ranks(settings, produces=False)
    producer.call("offer", "t", [11, 12])
    source = producer.call("source")
    consumer.load(source, "t", [1, 2])
    assert consumer.loaded("t").cause is None
    assert consumer.count("pulled_pieces") == 4
    assert consumer.page(1) == producer.call("page", 11)
    producer.call("offer", "u", [11, 12])
    producer.kill()
    consumer.load(source, "u", [1, 2])
    assert consumer.loaded("u").cause in (Cause.SESSION_LOST, Cause.UNREACHABLE)
