# SPDX-License-Identifier: Apache-2.0
"""Only a peer with the shared secret is let in."""

import hashlib
import time
from collections.abc import Iterator

import pytest
import zmq

from pd_connector.config_rules import MIN_KEY_CHARACTERS
from pd_connector.control.keys import CurveKeys, Gatekeeper, new_key, secret

SECRET = "a shared secret of some length"
DEADLINE_S = 60.0

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(linger=0)


class _Guarded:
    """A listening socket that demands the key of SECRET, with its gatekeeper."""

    def __init__(self, context: Context) -> None:
        keys = CurveKeys.derive(SECRET)
        self.gatekeeper = Gatekeeper(context, keys)
        self.socket = context.socket(zmq.PULL)
        keys.demand(self.socket)
        self._port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self._dialled: list[zmq.Socket[bytes]] = []

    def dial(self, context: Context, keys: CurveKeys | None) -> zmq.Socket[bytes]:
        dialled = context.socket(zmq.PUSH)
        dialled.linger = 0
        if keys:
            keys.present(dialled)
        dialled.connect(f"tcp://127.0.0.1:{self._port}")
        self._dialled.append(dialled)  # a socket that nobody holds is closed
        return dialled

    def receive(self) -> bytes:
        deadline = time.monotonic() + DEADLINE_S
        while not self.socket.poll(1):
            self.gatekeeper.answer()
            assert time.monotonic() < deadline
        return self.socket.recv()


def test_the_same_secret_gives_the_same_keys_everywhere() -> None:
    assert CurveKeys.derive(SECRET) == CurveKeys.derive(SECRET)
    keys = CurveKeys.derive(SECRET)
    assert len(set(keys)) == 4
    assert zmq.curve_public(keys.server_secret) == keys.server_public
    assert zmq.curve_public(keys.client_secret) == keys.client_public


def test_another_secret_shares_no_key() -> None:
    assert not set(CurveKeys.derive(SECRET)) & set(CurveKeys.derive(SECRET + "."))


def test_new_keys_differ_and_are_long_enough_for_the_config() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= MIN_KEY_CHARACTERS


def test_who_has_the_secret_is_let_in(context: Context) -> None:
    guarded = _Guarded(context)
    guarded.dial(context, CurveKeys.derive(SECRET)).send(b"hello")
    assert guarded.receive() == b"hello"


def _with_own_client_pair() -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys.derive(SECRET)._replace(client_public=public, client_secret=secret)


@pytest.mark.parametrize(
    "keys",
    [None, CurveKeys.derive("another secret"), _with_own_client_pair()],
    ids=["no key", "another secret", "server's public key only"],
)
def test_who_lacks_the_secret_is_not_heard(context: Context, keys: CurveKeys | None) -> None:
    guarded = _Guarded(context)
    guarded.dial(context, keys).send(b"intruder", zmq.DONTWAIT)
    for number in range(3):
        guarded.dial(context, CurveKeys.derive(SECRET)).send(b"%d" % number)
        assert guarded.receive() == b"%d" % number


def test_a_gatekeeper_does_not_wait_when_nobody_asks(context: Context) -> None:
    gatekeeper = Gatekeeper(context, CurveKeys.derive(SECRET))
    gatekeeper.answer()
    gatekeeper.close()


def test_a_made_key_is_used_as_it_is_and_a_phrase_is_stretched():
    made, phrase = new_key(), "a phrase that somebody might have thought of"
    plain = hashlib.blake2b(made.encode(), digest_size=32, person=b"purpose").digest()
    assert secret(made, b"purpose") == plain, "as versions before this one derived it"
    quick = hashlib.blake2b(phrase.encode(), digest_size=32, person=b"purpose").digest()
    assert secret(phrase, b"purpose") != quick
    assert secret(phrase, b"purpose") == secret(phrase, b"purpose")
    assert secret(phrase, b"purpose") != secret(phrase, b"another")
