# SPDX-License-Identifier: Apache-2.0
"""Names are looked up by other threads; nobody waits for a name server."""

import threading
from collections.abc import Callable

import pytest
from support.clocks import Clock

from pd_connector.control import resolver as resolver_module
from pd_connector.control.resolver import Resolver, UnknownHostError, canonical


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("::1", "::1"),
        ("localhost", None),
        ("10.1", None),
        ("", None),
    ],
)
def test_an_address_has_one_spelling(written: str, meant: str | None):
    assert canonical(written) == meant


class SlowLookup:
    """Answers nobody until it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.asked: list[str] = []

    def __call__(self, host: str) -> str:
        self.asked.append(host)
        assert self.release.wait(20)
        return "10.0.0.1"


def resolver(lookup: Callable[[str], str]) -> tuple[Resolver, threading.Event]:
    woken = threading.Event()
    return Resolver(woken.set, lookup), woken


def test_a_name_is_looked_up_once_and_numeric_addresses_never():
    asked: list[str] = []

    def lookup(host: str) -> str:
        asked.append(host)
        return "10.0.0.1"

    names, woken = resolver(lookup)
    assert names.address("192.0.2.1") == "192.0.2.1"
    assert names.address("a.example") is None
    assert woken.wait(20)
    assert [names.address("a.example") for _ in range(3)] == ["10.0.0.1"] * 3
    assert asked == ["a.example"]


@pytest.mark.parametrize("error", [OSError("no such name"), UnicodeError("no name")])
def test_a_name_that_is_not_known_is_an_error_that_is_remembered(error: Exception):
    def lookup(host: str) -> str:
        raise error

    names, woken = resolver(lookup)
    assert names.address("a") is None
    assert woken.wait(20)
    with pytest.raises(UnknownHostError, match="'a' cannot be resolved"):
        names.address("a")


def test_slow_names_wait_for_each_other_and_nobody_for_them():
    slow = SlowLookup()
    names, woken = resolver(slow)
    before = threading.active_count()
    for i in range(40):
        assert names.address(f"{i}.example") is None
    assert threading.active_count() - before <= 4
    slow.release.set()
    while any(names.address(f"{i}.example") is None for i in range(40)):
        assert woken.wait(20)
    assert len(slow.asked) == 40


def test_after_its_end_nobody_is_woken():
    release = threading.Event()
    names, woken = resolver(lambda host: "10.0.0.1" if release.wait(20) else "")
    names.address("a")
    names.close()
    release.set()
    while any(thread.name == "pd-resolve" for thread in threading.enumerate()):
        pass
    assert not woken.is_set()


def test_a_system_without_threads_is_an_error_of_the_name_and_not_of_the_agent(
    monkeypatch: pytest.MonkeyPatch,
):
    names, woken = resolver(lambda host: "10.0.0.1")

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        for i in range(8):
            assert names.address(f"{i}") is None
            with pytest.raises(UnknownHostError, match="can't start new thread"):
                names.address(f"{i}")
    assert names.address("later") is None
    assert woken.wait(20)
    assert names.address("later") == "10.0.0.1"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(resolver_module, "time", made)
    return made


def test_lookups_that_hang_do_not_keep_other_names_waiting_for_ever(clock: Clock):
    release = threading.Event()
    asked: list[str] = []

    def lookup(host: str) -> str:
        asked.append(host)
        assert not host.startswith("hung") or release.wait(60)
        return "10.0.0.1"

    names, woken = resolver(lookup)
    before = threading.active_count()
    for _ in range(20):  # each name is asked for again and again
        for i in range(100):
            names.address(f"hung {i}")
        clock.now += 29.0
    assert threading.active_count() - before <= 32
    assert names.address("good") is None
    release.set()
    while names.address("good") is None:
        assert woken.wait(20)
        clock.now += 0.1


def test_a_hung_lookup_makes_room_for_another_name(clock: Clock):
    release = threading.Event()
    names, woken = resolver(lambda host: "10.0.0.1" if host == "good" or release.wait(60) else "")
    for i in range(4):
        assert names.address(f"hung {i}") is None
    assert names.address("good") is None
    assert not woken.wait(0.1)
    clock.now += 31.0
    assert names.address("good") is None
    assert woken.wait(20)
    assert names.address("good") == "10.0.0.1"
    release.set()


def test_names_that_nobody_asks_for_any_more_are_not_looked_up(clock: Clock):
    slow = SlowLookup()
    names, woken = resolver(slow)
    for i in range(1000):
        assert names.address(f"{i}") is None
    clock.now += 29.0
    assert names.address("999") is None
    clock.now += 2.0
    slow.release.set()
    while names.address("999") is None:
        assert woken.wait(20)
    assert len(slow.asked) == 5
    assert not names._queued
