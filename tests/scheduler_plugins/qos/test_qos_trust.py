# SPDX-License-Identifier: Apache-2.0
"""The class that a router gives, and nobody else."""

from __future__ import annotations

import pytest

from scheduler_plugins.qos.trust import BELIEVED_S, HEADER, signed, signed_class

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
