# SPDX-License-Identifier: Apache-2.0
"""A far client reads the next objects while its caller takes those before. Calls meet in every order that can do harm.

The child is a thread of the test, so the test decides when it reads."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.waits import until

from pd_connector.pool.carrier import child as child_module
from pd_connector.pool.carrier import client as client_module
from pd_connector.pool.carrier import deadlines
from pd_connector.pool.carrier.child import serve
from pd_connector.pool.carrier.client import FarClient, SilentError
from pd_connector.pool.carrier.deadlines import Deadlines

SIZE = 1000
WAIT_S = 30.0


def content(name: str) -> bytes:
    return name.encode() * (SIZE // len(name))


class Gated:
    """A far store whose reads begin and end when the test wants."""

    def __init__(self) -> None:
        self.begun, self.ended = ({name: threading.Event() for name in "abcdef"} for _ in range(2))
        self.gates: dict[str, threading.Event] = {}
        self.kept: dict[str, bytes] = {}

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        for name, buffer in zip(names, buffers, strict=True):
            self.begun[name].set()
            if gate := self.gates.get(name):
                gate.wait(WAIT_S)
            buffer[:] = content(name)
            self.ended[name].set()
        return [SIZE] * len(names)

    def has(self, names: Sequence[str]) -> list[int]:
        return [SIZE] * len(names)

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        self.kept |= {name: bytes(each) for name, each in zip(names, data, strict=True)}
        return [True] * len(names)

    def close(self) -> None: ...


class Process:
    """In the place of a child's process."""

    pid = 1

    def __init__(self, channel: socket.socket, descriptor: int) -> None:
        self._channel, self._dead = channel, False
        self._thread = threading.Thread(target=self._serve, args=(descriptor,), daemon=True)
        self._thread.start()

    def _serve(self, descriptor: int) -> None:
        try:
            serve(self._channel, descriptor)
        except OSError:  # killed
            pass
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        self._dead = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def poll(self) -> int | None:
        return -9 if self._dead else None

    def wait(self) -> None:
        """As after a real kill, it writes nothing any more."""
        self._thread.join()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Gated:
    made = Gated()
    monkeypatch.setattr(child_module, "far_class", lambda scheme: lambda *args: made)
    return made


@pytest.fixture
def client(store: Gated, monkeypatch: pytest.MonkeyPatch) -> Iterator[FarClient]:
    def started(self: FarClient, theirs: socket.socket) -> Any:
        return Process(theirs.dup(), os.dup(self._shared))

    monkeypatch.setattr(FarClient, "_started", started)
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(client_module, "_GET_BYTES", 2 * SIZE - 1)  # one object in each call
    made = FarClient("test", "redis://h", WAIT_S)
    until(lambda: made.is_ready, "the client")
    yield made
    for gate in store.gates.values():
        gate.set()
    made.close()


class Taken:
    """What a reader has taken.

    Args:
        first: called with the first object, before its bytes are looked at.
    """

    def __init__(self, first: Any = lambda: None) -> None:
        self.right: list[bool] = []
        self._first = first

    def __call__(self, place: int, data: memoryview) -> None:
        assert place == len(self.right), "in their order"
        if not place:
            self._first()
        self.right.append(bytes(data) == content("abcdef"[place]))


def read(client: FarClient, taken: Taken, names: str = "abcdef") -> None:
    client.get(list(names), [SIZE] * len(names), taken)


def test_the_next_object_is_read_while_one_is_taken(client: FarClient, store: Gated) -> None:
    def first() -> None:
        assert store.begun["b"].wait(WAIT_S)
        assert not store.begun["c"].is_set(), "its memory is still in use"

    taken = Taken(first)
    read(client, taken)
    assert taken.right == [True] * 6


def test_what_is_taken_is_not_overwritten(client: FarClient, store: Gated) -> None:
    taken = Taken(lambda: store.ended["b"].wait(WAIT_S))
    read(client, taken)
    assert taken.right == [True] * 6


def test_in_the_same_memory_it_would_be_overwritten(
    client: FarClient, store: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    split = client_module.split
    monkeypatch.setattr(
        client_module, "split", lambda sizes: [each._replace(start=0) for each in split(sizes)]
    )
    taken = Taken(lambda: store.ended["b"].wait(WAIT_S))
    read(client, taken)
    assert not taken.right[0]


def test_a_large_object_is_read_alone(
    client: FarClient, store: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_HALF_BYTES", SIZE - 1)
    begun: list[bool] = []
    taken = Taken(lambda: begun.append(store.begun["b"].is_set()))
    read(client, taken)
    assert (begun, taken.right) == ([False], [True] * 6)


def test_an_error_of_the_reader_harms_no_later_call(client: FarClient, store: Gated) -> None:
    """A read is under way then. The next caller gets its own answer, and that read does not write into its memory."""
    gate = store.gates["b"] = threading.Event()

    def first() -> None:
        assert store.begun["b"].wait(WAIT_S)
        threading.Timer(0.05, gate.set).start()
        raise RuntimeError("nobody has thought of this")

    with pytest.raises(RuntimeError):
        read(client, Taken(first))
    assert client.put(["x", "y"], [SIZE, SIZE], lambda place, room: room.__setitem__(slice(None), content("xy"[place])))  # fmt: skip
    assert store.kept == {"x": content("x"), "y": content("y")}
    assert (client.killed, client.opened) == (0, 1)


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_child_that_ends_with_two_calls_under_way(
    client: FarClient, store: Gated, how: str
) -> None:
    """What was taken is right, the rest is given up, and the next child serves."""
    store.gates["b"] = threading.Event()

    def first() -> None:
        assert store.begun["b"].wait(WAIT_S)
        if how == "killed":
            assert client._ready
            client._ready[0].kill()
            store.gates.pop("b").set()
        else:
            client._deadlines = Deadlines(0.0)

    taken = Taken(first)
    with pytest.raises(SilentError):
        read(client, taken)
    assert taken.right == [True]
    client._deadlines = Deadlines(WAIT_S)
    for gate in store.gates.values():
        gate.set()
    store.gates.clear()
    until(lambda: client.is_ready and client.opened == 2, "another child")
    taken = Taken()
    read(client, taken)
    assert taken.right == [True] * 6


def test_a_read_that_outlives_its_child_does_not_end_the_next_child(
    client: FarClient, store: Gated
) -> None:
    store.gates["b"] = threading.Event()

    def first() -> None:
        assert store.begun["b"].wait(WAIT_S)
        assert client._ready
        client._ready[0].kill()
        store.gates.pop("b").set()
        until(lambda: client.is_ready and client.opened == 2, "another child")

    with pytest.raises(SilentError):
        read(client, Taken(first))
    assert client.has(["x"]) == [SIZE]
    assert (client.killed, client.opened) == (0, 2)


def test_the_end_of_a_client_with_two_calls_under_way(client: FarClient, store: Gated) -> None:
    store.gates["b"] = threading.Event()
    closes = threading.Thread(target=client.close)

    def first() -> None:
        assert store.begun["b"].wait(WAIT_S)
        closes.start()

    taken = Taken(first)
    with pytest.raises(SilentError):
        read(client, taken)
    assert taken.right == [True]
    store.gates.pop("b").set()
    closes.join(WAIT_S)
    assert not closes.is_alive()


def test_a_store_that_has_shown_its_speed_is_given_up_sooner(
    client: FarClient, store: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "_MEASURED_BYTES", SIZE)
    monkeypatch.setattr(deadlines, "CAUTIOUS_BYTES_S", 1.0)
    client._deadlines = Deadlines(1e-3)
    assert client._deadlines.of(SIZE) > SIZE
    read(client, Taken(), "a")
    given_s = client._deadlines.of(SIZE)
    assert given_s < WAIT_S, "else the next line would wait for 1,000 s"
    store.gates["a"] = threading.Event()
    with pytest.raises(SilentError, match=f"has not answered for {given_s:.2f} s"):
        read(client, Taken())
    store.gates.pop("a").set()
    assert client._deadlines.of(SIZE) >= given_s
