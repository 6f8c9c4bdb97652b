# SPDX-License-Identifier: Apache-2.0
"""A host is what its spelling says, and nothing that libzmq would read in it beside that."""

import pytest

from pd_connector.config import Config
from pd_connector.control.addresses import numeric
from pd_connector.control.resolver import canonical
from pd_connector.hosts import (
    is_host,
    is_loopback,
    is_wildcard,
    matches,
    numeric_address,
    server_url,
    without_secret,
)

ZONES = (
    "::1%lo]:0;[2001:db8::5",
    "::1%lo;tcp://10.0.0.1",
    "::1%a b",
    "::1%lo/8",
    "::1%" + "x" * 16,
)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.255.0.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::1%lo", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),
        ("localhost.example", False),
        ("127.0.0.1:80", False),
        ("2130706433", False),
        ("", False),
    ],
)
def test_loopback_is_told_from_the_text_alone(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("host", ZONES)
def test_a_zone_cannot_bring_in_a_second_address(host: str) -> None:
    config = Config.load({"peers": ["::/0", "localhost"]}, {})
    assert not config.is_peer(host)
    assert not config.permits(host)
    assert numeric_address(host) is None
    assert canonical(host) is None, "libzmq is given numeric addresses only"


def test_the_zone_of_an_interface_is_allowed() -> None:
    assert str(numeric_address("fe80::1%eth0.7")) == "fe80::1%eth0.7"
    assert matches("fe80::1%eth0", "fe80::/10")
    assert not matches("fe80::1%eth0", "::1")


@pytest.mark.parametrize(
    ("host", "wildcard"),
    [("*", True), ("", True), ("0.0.0.0", True), ("::", True), ("::1", False), ("host", False)],
)
def test_a_wildcard_is_no_address_to_be_reached_under(host: str, wildcard: bool) -> None:
    assert is_wildcard(host) is wildcard


@pytest.mark.parametrize(
    "host", ["a", "a_b.example.", "10.0.0.1", "::1", "fe80::1%eth0", "bücher.example"]
)
def test_names_and_addresses_are_hosts(host: str) -> None:
    assert is_host(host)


@pytest.mark.parametrize("host", ["", "x..y", "a" * 64, "a:1", "[::1]", "a/b", "a b", "u@a"])
def test_what_no_machine_can_be_called_is_none(host: str) -> None:
    assert not is_host(host)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("redis://u:PW@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:PW@h", "redis://:***@h"),
        ("redis://PW@h", "redis://***@h"),
        ("u:PW@h:1", "u:***@h:1"),
        ("PW@h:1", "***@h:1"),
        ("redis:/u:PW@h", "redis:***@h"),
        ("redis:///u:PW@h:1", "redis:///u:***@h:1"),
        ("http:///PW@h", "http:///***@h"),
        ("k8s+http:///u:PW@ns:1/a=b", "k8s+http:///u:***@ns:1/a=b"),
        ("dns+http://u/x:PW@h:1", "dns+http://u/x:***@h:1"),
        ("rediss://h:1?ca=/run/a@b.pem", "rediss://h:1?ca=/run/a@b.pem"),
        ("rediss://u:PW@h:1?ca=/run/a@b.pem", "rediss://u:***@h:1?ca=/run/a@b.pem"),
        ("//PW@h", "***@h"),
        ("http://h?Token=PW&a=b", "http://h?Token=***&a=b"),
        ("s3://b/c@d?endpoint=https://u:PW@h", "s3://b/c@d?endpoint=https://u:***@h"),
        ("lmcache:/a@b", "lmcache:/a@b"),
        ("http://h:8000", "http://h:8000"),
    ],
)
def test_an_address_for_people_has_no_password(written: str, shown: str) -> None:
    assert without_secret(written) == shown


@pytest.mark.parametrize("url", ["http://:PW@h:1", "http://u:PW@h:1", "u:PW@h:1", "http://PW@h"])
def test_a_url_with_a_password_is_refused(url: str) -> None:
    """It would be the engine's name in metrics, logs and pages."""
    with pytest.raises(ValueError, match="user name or password") as raised:
        server_url(url)
    assert "PW" not in str(raised.value)


@pytest.mark.parametrize("host", ["x..y", f"{'a' * 64}.example"])
def test_a_name_that_python_cannot_ask_for_is_one_that_does_not_resolve(host: str) -> None:
    """`socket` raises a UnicodeError, which nobody expects of a lookup."""
    with pytest.raises(OSError, match="cannot be a host name"):
        numeric(host)
