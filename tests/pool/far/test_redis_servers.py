# SPDX-License-Identifier: Apache-2.0
"""Redis with TLS, with an ACL, and as a cluster: real servers, and the client that a carrier uses."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import pytest
from support.free_ports import free_ports
from support.redis_servers import RedisServer, redis_server
from support.waits import until

from pd_connector.pool.far import redis as redis_module
from pd_connector.pool.far.redis import RedisStore

PASSWORD = "p/w:d"
ACL = (
    "user pd on >p/w:d ~pd:* +ping +strlen +getrange +set +unlink +cluster +command +client",
    "user default off",
)
Found = TypeVar("Found")
NAMES = [f"{number:064x}" for number in range(40)]


def opened(address: str) -> RedisStore:
    assert RedisStore.problem(urlsplit(address)) == ""
    return RedisStore(urlsplit(address), 20.0)


def keeps(store: RedisStore, names: Sequence[str] = NAMES) -> None:
    """Puts objects, finds them, gets them, and removes them."""
    objects = {name: name.encode() * (1 + place) for place, name in enumerate(names)}
    assert store.put(list(objects), [memoryview(data) for data in objects.values()]) == [
        True
    ] * len(names)
    assert store.has([*names, "f" * 64]) == [*map(len, objects.values()), 0]
    buffers = [bytearray(len(data)) for data in objects.values()]
    assert store.get(names, [memoryview(each) for each in buffers]) == list(map(len, buffers))
    assert list(map(bytes, buffers)) == list(objects.values())
    store.remove([*names, "f" * 64])
    assert store.has(names) == [0] * len(names)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A key, and a certificate of 127.0.0.1 that is its own authority."""
    key, made = tmp_path / "key.pem", tmp_path / "cert.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=far", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(
            [*request, *names, "-keyout", key, "-out", made], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("needs openssl, which makes a certificate")
    return key, made


def test_tls_is_verified(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    key, made = certificate
    (port,) = free_ports(1)
    tls = ("--tls-port", str(port), "--tls-cert-file", str(made), "--tls-key-file", str(key))
    with redis_server(tmp_path, *tls, "--tls-auth-clients", "no"):
        store = until_it_opens(lambda: opened(f"rediss://127.0.0.1:{port}?ca={made}"))
        keeps(store)
        store.close()
        with pytest.raises(Exception, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify"):
            opened(f"rediss://127.0.0.1:{port}")
        with pytest.raises(Exception, match=r".+"):  # no TLS at a port that wants it
            opened(f"redis://127.0.0.1:{port}")


def test_the_documented_acl_permits_all_that_a_carrier_sends_and_no_more(tmp_path: Path) -> None:
    import redis

    rules = tmp_path / "acl"
    rules.write_text("\n".join(ACL) + "\n")
    with redis_server(tmp_path, "--aclfile", str(rules)) as server:
        store = opened(f"redis://pd:p%2Fw%3Ad@127.0.0.1:{server.port}")
        keeps(store)
        stranger = redis.Redis(port=server.port, username="pd", password=PASSWORD)
        for refused in (
            lambda: stranger.set("other", b"x"),
            lambda: stranger.keys("*"),
            stranger.flushall,
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                refused()
        for wrong in ("", "pd:wrong@", "nobody:p%2Fw%3Ad@"):
            with pytest.raises((redis.exceptions.AuthenticationError, redis.ResponseError)):
                opened(f"redis://{wrong}127.0.0.1:{server.port}")
        stranger.close()
        store.close()


def test_a_user_who_may_not_write_keeps_nothing_and_reads(tmp_path: Path) -> None:
    rules = tmp_path / "acl"
    rules.write_text(
        "user pd on nopass ~pd:* +ping +strlen +getrange +client\nuser default on nopass ~* +@all\n"
    )
    with redis_server(tmp_path, "--aclfile", str(rules)) as server:
        server.client().set(f"pd:{NAMES[0]}", b"there")
        store = opened(f"redis://pd:any@127.0.0.1:{server.port}")
        assert store.put(NAMES[:2], [memoryview(b"x")] * 2) == [False, False]
        assert store.has(NAMES[:2]) == [5, 0]
        store.close()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that has kept some of the objects `NAMES` of 1 MiB."""
    with redis_server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        store = opened(server.address)
        assert 0 < sum(store.put(NAMES, [memoryview(bytes(1 << 20))] * len(NAMES))) < 20
        store.close()
        yield server


@pytest.mark.parametrize(
    ("pause_s", "sent"), [(3600.0, range(4 << 20)), (0.0, range(40 << 20, 1 << 30))]
)
def test_a_full_server_is_sent_one_object_in_a_while(
    full: RedisServer, monkeypatch: pytest.MonkeyPatch, pause_s: float, sent: range
) -> None:
    """It refuses an object only after it has come. Without the pause, the control, all are sent for nothing."""
    monkeypatch.setattr(redis_module, "_FULL_S", pause_s)
    store, stranger = opened(full.address), full.client()
    before = stranger.info("stats")["total_net_input_bytes"]
    for _ in range(3):
        assert not any(store.put(NAMES[20:], [memoryview(bytes(1 << 20))] * 20))
    assert stranger.info("stats")["total_net_input_bytes"] - before in sent
    store.close()


def test_a_server_that_has_room_again_is_sent_objects(
    full: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "_FULL_S", 0.05)
    store, objects = opened(full.address), [memoryview(bytes(1 << 20))] * 3
    assert not any(store.put(NAMES[20:23], objects))
    full.client().flushall()
    until(lambda: all(store.put(NAMES[20:23], objects)))
    store.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Three nodes that share the slots."""
    with ExitStack() as opened_servers:
        nodes = []
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            (bus,) = free_ports(1)
            settings = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
            settings += ("--cluster-node-timeout", "60000")
            nodes.append(opened_servers.enter_context(redis_server(folder, *settings)))
            nodes[-1].bus = bus  # type: ignore[attr-defined]
        for number, node in enumerate(nodes):
            slots = range(number * 16384 // 3, (number + 1) * 16384 // 3)
            node.client().execute_command("CLUSTER", "ADDSLOTS", *slots)
            node.client().execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            nodes[0].client().execute_command(
                "CLUSTER",
                "MEET",
                "127.0.0.1",
                node.port,
                node.bus,  # type: ignore[attr-defined]
            )
        until_it_opens(lambda: all_agree(nodes))
        yield nodes


def all_agree(nodes: Sequence[RedisServer]) -> bool:
    for node in nodes:
        found = node.client().execute_command("CLUSTER", "INFO")
        text = found.decode() if isinstance(found, bytes) else str(found)
        assert "cluster_state:ok" in text or ("cluster_state" in text and "'ok'" in text), text
    return True


def until_it_opens(step: Callable[[], Found]) -> Found:
    """Again until it raises nothing."""
    until_s = time.monotonic() + 60
    while True:
        try:
            return step()
        except Exception:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def test_a_cluster_keeps_objects_on_all_its_nodes(cluster: list[RedisServer]) -> None:
    store = until_it_opens(lambda: opened(f"redis://127.0.0.1:{cluster[0].port}?cluster=1"))
    assert all(store.put(NAMES, [memoryview(b"object")] * len(NAMES)))
    counts = [node.client().dbsize() for node in cluster]
    assert sum(counts) == len(NAMES)
    assert min(counts) > 0
    keeps(store)
    store.close()


def test_without_cluster_1_a_cluster_does_not_lose_objects_silently(
    cluster: list[RedisServer],
) -> None:
    """The control: a node keeps its own objects only."""
    store = until_it_opens(lambda: opened(f"redis://127.0.0.1:{cluster[0].port}"))
    taken = store.put(NAMES, [memoryview(b"object")] * len(NAMES))
    assert 0 < sum(taken) < len(NAMES)
    store.close()


def test_a_full_node_of_a_cluster_does_not_keep_objects_from_the_others(
    cluster: list[RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "_FULL_S", 3600.0)
    store = until_it_opens(lambda: opened(f"redis://127.0.0.1:{cluster[0].port}?cluster=1"))
    cluster[0].client().config_set("maxmemory", 1)
    objects = [memoryview(b"object")] * len(NAMES)
    taken = [store.put(NAMES, objects) for _ in range(2)]
    full, *others = (node.client().dbsize() for node in cluster)
    assert full == 0
    assert [sum(each) for each in taken] == [sum(others)] * 2
    assert 0 < sum(others) < len(NAMES)
    store.close()
