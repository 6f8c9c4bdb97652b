# SPDX-License-Identifier: Apache-2.0
"""An address of a far store is checked before anything is dialled; errors have no password."""

import sys

import pytest

from pd_connector.errors import ConfigError
from pd_connector.hosts import without_secret
from pd_connector.pool.far import redis as redis_module
from pd_connector.pool.far.registry import far_address, is_loopback

pytest.importorskip("redis")


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("redsi://h", "did you mean 'redis'"),
        ("ftp://h", "far store 'ftp' is not known"),
        ("localhost:6379", "'localhost' is not known"),
        ("//h", "must begin with a scheme"),
        ("redis://", "names no host"),
        ("redis://h:99999", "is not an address"),
        ("redis://h/x", "must be the number of a database"),
        ("redis://h?tls=1", r"\?tls=: is not known"),
        ("redis://h/2?cluster=1", "a cluster has database 0 only"),
        ("redis://h?cluster=yes", "must be 1"),
        ("redis://h?ca=/absent", "needs rediss://"),
        ("rediss://h?ca=/absent", "there is no such file"),
        ("rediss://h:1?ca=/absent/a@b.pem", "there is no such file"),
    ],
)
def test_a_wrong_address_is_refused_by_name(address: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found) as raised:
        far_address(address, sealed=True)
    assert "--far" in str(raised.value)


@pytest.mark.parametrize("host", ["10.0.0.1", "redis.example", "[2001:db8::1]", "0.0.0.0"])
def test_without_a_key_only_loopback_is_accepted(host: str) -> None:
    with pytest.raises(ConfigError, match="--key-file") as raised:
        far_address(f"rediss://user:secret@{host}:6379", sealed=False)
    assert "secret" not in str(raised.value)
    far_address(f"rediss://user:secret@{host}:6379", sealed=True)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    far_address(f"redis://{host}", sealed=False)


def test_a_cluster_needs_a_key_also_on_loopback() -> None:
    """The first node names the others, which can be anywhere."""
    address = "redis://127.0.0.1:7000?cluster=1"
    with pytest.raises(ConfigError, match=r"cluster's other nodes.*--key-file"):
        far_address(address, sealed=False)
    far_address(address, sealed=True)


def test_names_that_only_look_like_loopback_are_not() -> None:
    assert not is_loopback("127.0.0.1.example")
    assert not is_loopback("localhost.example")
    assert not is_loopback("")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_module, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'pd-connector\[redis\]'"):
        far_address("redis://h", sealed=True)


def test_the_password_is_never_shown() -> None:
    assert without_secret("redis://u:p%40w@h:1/0") == "redis://u:***@h:1/0"
    assert without_secret("redis://:pw@h") == "redis://:***@h"
    assert without_secret("redis://h:6379") == "redis://h:6379"


@pytest.mark.parametrize(
    "password", ["sec:ret", "sec@ret", "sec/ret", "12/ret", "1?ret", "s[ret", "sec#ret"]
)
def test_a_password_that_is_not_encoded_is_never_shown(password: str) -> None:
    address = f"redis://u:{password}@h:1/0"
    assert without_secret(address) == "redis://u:***@h:1/0"
    with pytest.raises(ConfigError) as raised:
        far_address(address, sealed=False)
    assert "sec" not in str(raised.value)
    assert "ret" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    "address",
    [
        "redis:u:PW@h", "redis:PW@h", ":PW@h:1", "PW@h", "//PW@h", "redis://u:PW", "redis://h:PW/0",
        "redis://h:6379:PW", "redis://h?password=PW", "redis://u:PW@h:x", "s3://b?endpoint=http://u:PW@h",
    ],
)  # fmt: skip
def test_a_password_at_a_wrong_place_is_never_shown(address: str) -> None:
    with pytest.raises(ConfigError, match="--far") as raised:
        far_address(address, sealed=False)
    assert "PW" not in str(raised.value)


def test_an_engine_does_not_import_a_client() -> None:
    program = (
        "import sys, pd_connector.pool.host, pd_connector.pool.store.reaching; "
        "print(any(name.split('.')[0] in ('redis', 'boto3', 'mooncake') for name in sys.modules))"
    )
    import subprocess

    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"
