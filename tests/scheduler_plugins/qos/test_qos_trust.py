# SPDX-License-Identifier: Apache-2.0
"""The class that a router gives, and nobody else."""

from __future__ import annotations

import hashlib

import pytest

from pd_connector.control.keys import CurveKeys
from scheduler_plugins.qos.trust import (
    BELIEVED_S,
    HEADER,
    checked_key,
    class_key,
    signed,
    signed_class,
)

KEY = b"secret of the cluster"


def headers(value: str, request_id: str = "r1") -> dict[str, str]:
    return {HEADER.lower(): value, "x-request-id": request_id}


@pytest.mark.parametrize("name", ["premium", "günstig", "a.b:c d", ""])
def test_an_engine_reads_what_the_router_signed(name: str) -> None:
    assert signed_class(headers(signed(name, "r1", KEY)), KEY) == name


def test_an_id_of_any_characters_is_the_same_on_both_sides() -> None:
    as_received = "é日".encode().decode("latin-1")
    assert signed_class(headers(signed("premium", "é日", KEY), as_received), KEY) == "premium"


def test_nobody_else_is_believed() -> None:
    value = signed("premium", "r1", KEY)
    at, name, signature = value.split(".")
    assert signed_class(headers(value), KEY) == "premium"
    assert signed_class(headers(value), b"another key") is None
    assert signed_class(headers(value), b"") is None, "an engine without a key believes nobody"
    assert signed_class(headers(value, "r2"), KEY) is None, "it was another request's"
    assert signed_class(headers(f"{at}.gold.{signature}"), KEY) is None
    assert signed_class(headers(f"{int(at) + 9}.{name}.{signature}"), KEY) is None
    assert signed_class({}, KEY) is None
    for wrong in ("", ".", "..", "premium", "x.premium.00", "é.é.é", value + "0"):
        assert signed_class(headers(wrong), KEY) is None


def test_a_signature_ends() -> None:
    value = signed("premium", "r1", KEY, 1000.0)
    assert signed_class(headers(value), KEY, 1000.0 + BELIEVED_S - 1) == "premium"
    assert signed_class(headers(value), KEY, 1000.0 + BELIEVED_S + 1) is None
    assert signed_class(headers(value), KEY, 1000.0 - BELIEVED_S - 1) is None


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
    assert class_key("") == b"", "no secret is no key"


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
