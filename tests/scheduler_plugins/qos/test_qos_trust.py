# SPDX-License-Identifier: Apache-2.0
"""The class that a router gives, and nobody else."""

from __future__ import annotations

import hashlib

import pytest

from pd_connector.control.keys import CurveKeys
from scheduler_plugins.qos import trust
from scheduler_plugins.qos.trust import (
    BELIEVED_S,
    HEADER,
    Seen,
    checked_key,
    class_key,
    signed,
    signed_class,
)

KEY = b"secret of the cluster"


def headers(value: str, request_id: str = "r1") -> dict[str, str]:
    return {HEADER.lower(): value, "x-request-id": request_id}


def believed(
    value: str, request_id: str = "r1", key: bytes = KEY, now_s: float | None = None
) -> str | None:
    """What an engine reads that has seen no signature yet."""
    return signed_class(headers(value, request_id), key, Seen(), now_s)


@pytest.mark.parametrize("name", ["premium", "günstig", "a.b:c d", ""])
def test_an_engine_reads_what_the_router_signed(name: str) -> None:
    assert believed(signed(name, "r1", KEY)) == name


def test_an_id_of_any_characters_is_the_same_on_both_sides() -> None:
    as_received = "é日".encode().decode("latin-1")
    assert believed(signed("premium", "é日", KEY), as_received) == "premium"


def test_nobody_else_is_believed() -> None:
    value = signed("premium", "r1", KEY)
    at, nonce, name, signature = value.split(".")
    assert believed(value) == "premium"
    assert believed(value, key=b"another key") is None
    assert believed(value, key=b"") is None, "an engine without a key believes nobody"
    assert believed(value, "r2") is None, "it was another request's"
    assert believed(f"{at}.{nonce}.gold.{signature}") is None
    assert believed(f"{int(at) + 9}.{nonce}.{name}.{signature}") is None
    assert believed(f"{at}.{nonce}0.{name}.{signature}") is None
    assert signed_class({}, KEY, Seen()) is None
    for wrong in ("", ".", "..", "...", "premium", "x.y.premium.00", "é.é.é.é", value + "0"):
        assert believed(wrong) is None


def test_a_signature_ends() -> None:
    value = signed("premium", "r1", KEY, 1000.0)
    assert believed(value, now_s=1000.0 + BELIEVED_S - 1) == "premium"
    assert believed(value, now_s=1000.0 + BELIEVED_S + 1) is None
    assert believed(value, now_s=1000.0 - BELIEVED_S - 1) is None


def test_clocks_that_differ_are_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """All requests are of the default class then, and nothing else would say so."""
    seen = Seen()
    for number in range(50):
        value = signed("premium", f"r{number}", KEY, 1000.0)
        assert signed_class(headers(value, f"r{number}"), KEY, seen, 1000.0 + 7200) is None
    assert signed_class(headers("1.2.premium.00"), KEY, Seen(), 1e9) is None, "no router's"
    (told,) = caplog.messages
    assert "7200 s ago" in told
    assert "NTP" in told


def test_a_signature_is_believed_once() -> None:
    """A header can be read on its way, and sent again with another prompt."""
    seen, value = Seen(), signed("premium", "r1", KEY, 1000.0)
    for after_s in (0.0, 1.0, BELIEVED_S - 1, BELIEVED_S + 1):
        found = signed_class(headers(value), KEY, seen, 1000.0 + after_s)
        assert found == ("premium" if after_s == 0.0 else None)
    again = signed("premium", "r1", KEY, 1001.0)
    assert signed_class(headers(again), KEY, seen, 1001.0) == "premium", "a retry is signed again"


def test_a_copy_that_is_changed_does_not_use_up_the_signature() -> None:
    seen, value = Seen(), signed("premium", "r1", KEY)
    assert signed_class(headers(value, "r2"), KEY, seen) is None
    assert signed_class(headers(value), KEY, seen) == "premium"


def test_what_an_engine_remembers_is_bounded_and_what_it_forgets_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trust, "MOST_SEEN", 5)
    seen = Seen()
    values = [signed("premium", "r1", KEY, 1000.0 + at_s) for at_s in range(8)]
    for value in values:
        assert signed_class(headers(value), KEY, seen, 1008.0) == "premium"
    assert len(seen._nonces) == len(seen._by_time) == 5
    for value in values:
        assert signed_class(headers(value), KEY, seen, 1008.0) is None
    late = signed("premium", "r1", KEY, 1000.5)
    assert signed_class(headers(late), KEY, seen, 1008.0) is None, "it may be one of those"
    later = signed("premium", "r1", KEY, 1008.0 + BELIEVED_S)
    assert signed_class(headers(later), KEY, seen, 1008.0 + BELIEVED_S) == "premium"
    assert len(seen._nonces) == 1, "the others have ended"


def test_a_secret_is_stretched_and_each_use_of_it_has_a_key_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signature that anybody reads must not be a fast way to try phrases."""
    phrase, stretched = "a phrase that someone chose", []
    scrypt = hashlib.scrypt

    def counted(*given: object, **named: object) -> bytes:
        stretched.append(named["n"])
        return scrypt(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "scrypt", counted)
    classes = class_key(phrase)
    assert stretched == [1 << 15]
    fellows, connector = CurveKeys.derive(phrase, b"pd-router"), CurveKeys.derive(phrase)
    assert len({classes, *fellows, *connector}) == 9
    assert class_key("") == b"", "without a secret there is no key"


@pytest.mark.parametrize("weak", ["a", "secret", "aaaaaaaaaaaaaaaaaaaaaaaa", "01234567" * 5])
def test_a_secret_that_can_be_guessed_is_refused_and_not_repeated(weak: str) -> None:
    with pytest.raises(ValueError, match=r"PD_ROUTER_KEY: a key .*pd-connector key") as caught:
        checked_key("PD_ROUTER_KEY", weak)
    assert f"key {weak}:" not in str(caught.value)


def test_the_end_of_a_line_is_no_part_of_a_secret() -> None:
    assert (
        checked_key("PD_ROUTER_KEY", " a secret that all routers of a test share\n")
        == "a secret that all routers of a test share"
    )
    assert checked_key("PD_ROUTER_KEY", "\n") == ""
