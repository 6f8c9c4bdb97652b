# SPDX-License-Identifier: Apache-2.0
"""Shared memory where a process runs out of descriptors: the memory's own descriptors are lost then."""

from collections.abc import Iterator

import pytest
from support.descriptors import no_descriptors
from support.waits import until

from pd_connector.memory.slab import Slab
from pd_connector.transport.shm.transport import ShmTransport

SLOT_BYTES = 4096


@pytest.fixture
def pair() -> Iterator[tuple[ShmTransport, ShmTransport]]:
    """A producer and a consumer."""
    slabs = [Slab(4, SLOT_BYTES, shared=True) for _ in range(4)]
    made = ShmTransport(*slabs[:2]), ShmTransport(*slabs[2:])
    yield made
    for transport in made:
        transport.close()
    for slab in slabs:
        slab.close()


@pytest.mark.parametrize("free", range(4))
def test_a_producer_that_cannot_hand_over_its_slab_connects_again(
    pair: tuple[ShmTransport, ShmTransport], free: int
) -> None:
    """With descriptors for its connection, for what comes over it, and for the mapping, or without."""
    producer, consumer = pair
    source = consumer.expect(producer.address())
    link = producer.connect(consumer.address())
    with no_descriptors(free):
        consumer.poll()
    found: list[object] = []

    def serves() -> bool:
        nonlocal link
        producer.poll()
        if producer.broken(link):
            producer.disconnect(link)
            link = producer.connect(consumer.address())
        if not found:
            consumer.read(source, 0, 8, 0, b"header")
        found.extend(one for one in consumer.poll()[1] if not one.problem)
        return bool(found)

    until(serves, "a chunk is read")
