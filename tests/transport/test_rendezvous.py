# SPDX-License-Identifier: Apache-2.0
"""The lobby of shared memory, where producers wait until they are expected."""

from collections.abc import Iterator

import pytest
from support.descriptors import no_descriptors
from support.waits import until

from pd_connector.transport.shm.rendezvous import TOKEN_BYTES, Listener, connect


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def test_without_a_descriptor_nobody_is_let_in_and_nothing_fails(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    token = b"t" * TOKEN_BYTES
    with connect(listener.name, token, []):
        at_rest = len(listener.pollables)
        with no_descriptors():
            for _ in range(3):
                assert listener.accept({token}) == []
            assert len(listener.pollables) < at_rest, "it does not ask to be called again at once"
        assert "(ulimit -n); raise that limit" in caplog.text
        accepted = []
        until(lambda: accepted.extend(listener.accept({token})) or bool(accepted), "let in")
        assert [one.token for one in accepted] == [token]
        accepted[0].close()
    assert len(listener.pollables) == at_rest


def test_whoever_waits_longest_makes_room(listener: Listener) -> None:
    with connect(listener.name, b"early" * 4, []) as early:
        assert listener.accept(()) == []
        with connect(listener.name, b"later" * 4, []):
            with no_descriptors():
                listener.accept(())
            early.setblocking(True)
            early.settimeout(30.0)
            assert early.recv(1) == b""
