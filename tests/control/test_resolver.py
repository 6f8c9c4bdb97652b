# SPDX-License-Identifier: Apache-2.0
"""Names are looked up by other threads; nobody waits for a name server."""

import threading
from collections.abc import Callable

import pytest

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
    release = threading.Event()
    asked: list[str] = []

    def lookup(host: str) -> str:
        asked.append(host)
        assert release.wait(20)
        return "10.0.0.1"

    names, woken = resolver(lookup)
    before = threading.active_count()
    for i in range(40):
        assert names.address(f"{i}.example") is None
    assert threading.active_count() - before <= 4
    release.set()
    while any(names.address(f"{i}.example") is None for i in range(40)):
        assert woken.wait(20)
    assert len(asked) == 40


def test_after_its_end_nobody_is_woken():
    release = threading.Event()
    names, woken = resolver(lambda host: "10.0.0.1" if release.wait(20) else "")
    names.address("a")
    names.close()
    release.set()
    while any(thread.name == "pd-resolve" for thread in threading.enumerate()):
        pass
    assert not woken.is_set()
