# SPDX-License-Identifier: Apache-2.0
"""Hosts with a carrier each, and a real Redis between them: what one saves the others load, whatever a stranger does there."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from chunks import begin, chain, content, loads, save, there
from support.far_hosts import Host, NewHost
from support.redis_servers import RedisServer
from support.waits import until

from pd_connector.errors import ConfigError, Miss, PoolError
from pd_connector.pool.carrier import asking
from pd_connector.pool.carrier.asking import FIND_S, SILENT_S
from pd_connector.pool.carrier.messages import Bring, Find, encode, new_socket
from pd_connector.pool.carrier.server import CarrierServer
from pd_connector.pool.store.base import FAR, MEMORY, Refusal


def saved(host: Host, name: str, chunks: int = 6, **more: object) -> list[bytes]:
    """Save a chain on a host, and wait until it is in the far store."""
    before, keys = host.count("put"), chain(name, chunks)
    assert save(host.own, keys, **more) == chunks  # type: ignore[arg-type]
    until(lambda: host.count("put") >= before + chunks, "the chunks in the far store")
    return keys


def brought(host: Host, keys: Sequence[bytes]) -> int:
    """How many of these chunks the host has, rightly, once it has asked for each."""
    right = 0
    for key in keys:
        try:
            found = host.store.bring(key)
        except PoolError:
            continue
        if found is not None:
            assert found.tier == MEMORY
            assert loads(host.store, key), "wrong bytes"
            right += 1
    return right


def test_what_one_host_saves_another_finds_brings_and_loads(new_host: NewHost) -> None:
    writer, reader = new_host("a"), new_host("b")
    keys = saved(writer, "prompt", tenant="team")
    found = reader.store.find([*keys, *chain("more", 3)])
    assert [each.tier for each in found if each] == [FAR] * len(keys)
    assert there(reader.own, keys) == 0
    assert brought(reader, keys) == len(keys)
    for chunk, key, parent in zip(reader.own.chunks(keys), keys, [b"", *keys], strict=False):
        assert (chunk.key, chunk.parent, chunk.tenant) == (key, parent, "team")
    assert there(reader.own, keys) == len(keys)
    assert reader.count("brought") == len(keys)


def test_a_chunk_of_several_ranks_comes_whole(new_host: NewHost) -> None:
    writer, reader = new_host("a"), new_host("b")
    (key,) = chain("ranks", 1)
    for part in ("r0", "r1", "r2"):
        writing = begin(writer.own, key, part=part, parts=3, nbytes=5000)
        assert not isinstance(writing, Refusal)
        with writing:
            writing.write(0, memoryview(content(key, part, 5000)))
            assert writing.publish()
    until(lambda: writer.count("put") == 1)
    found = reader.store.bring(key)
    assert found
    assert found.parts == ("r0", "r1", "r2")
    assert all(loads(reader.store, key, part) for part in found.parts)


def test_a_chunk_comes_once_for_all_who_wait(new_host: NewHost) -> None:
    writer, reader = new_host("a"), new_host("b")
    keys = saved(writer, "prompt", 8)
    reader.store.prefetch(keys)  # a load begins
    futures = [each for _ in range(16) for each in reader.carrier.bring(keys)]
    assert all(not future.result(20).cause for future in futures)
    assert reader.count("brought") == len(keys)


def test_what_came_from_afar_is_not_put_again(new_host: NewHost) -> None:
    writer, reader = new_host("a"), new_host("b")
    keys = saved(writer, "prompt")
    assert brought(reader, keys) == len(keys)
    time.sleep(0.6)
    assert reader.count("put") == 0


def test_chunks_from_before_the_carrier_and_those_that_the_store_lost_are_put(
    new_host: NewHost, redis: RedisServer
) -> None:
    writer = new_host("a")
    keys = saved(writer, "prompt")
    redis.client().flushall()
    writer.stop()
    writer.start()
    until(lambda: writer.ready().count("put") == len(keys), "all chunks again")


def test_hosts_with_other_keys_share_nothing(new_host: NewHost) -> None:
    writer, reader = new_host("a"), new_host("b", keys=(b"other" * 6 + b"xx",))
    keys = saved(writer, "prompt")
    assert there(reader.store, keys) == 0
    changing = new_host("c", keys=(b"other" * 6 + b"xx", writer.keys[0]))
    assert brought(changing, keys) == len(keys), "the second key opens"


def names_of_chunks(stranger: Any) -> list[bytes]:
    """Names of objects that are larger than markers."""
    return [name for name in stranger.keys("*") if stranger.strlen(name) > 1000]


Change = Callable[[Any, list[bytes], random.Random], None]


def flip(stranger: Any, names: list[bytes], rng: random.Random) -> None:
    for name in names:
        data = bytearray(stranger.get(name))
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        stranger.set(name, bytes(data))


def swap(stranger: Any, names: list[bytes], _: random.Random) -> None:
    values = stranger.mget(names)
    for name, value in zip(names, values[1:] + values[:1], strict=True):
        stranger.set(name, value)


def cut(stranger: Any, names: list[bytes], rng: random.Random) -> None:
    for name in names:
        data = stranger.get(name)
        stranger.set(name, data[: rng.randrange(len(data))])


def zero(stranger: Any, names: list[bytes], _: random.Random) -> None:
    for name in names:
        stranger.set(name, bytes(stranger.strlen(name)))


def lengthen(stranger: Any, names: list[bytes], _: random.Random) -> None:
    for name in names:
        stranger.append(name, b"more")


def other_type(stranger: Any, names: list[bytes], _: random.Random) -> None:
    for name in names:
        stranger.delete(name)
        stranger.hset(name, "field", "value")


def remove(stranger: Any, names: list[bytes], _: random.Random) -> None:
    stranger.delete(*names)


CHANGES = [flip, swap, cut, zero, lengthen, other_type, remove]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_stranger_writes_costs_a_miss_and_is_removed(
    pair: tuple[Host, Host, RedisServer], change: Change
) -> None:
    writer, reader, redis = pair
    redis.client().flushall()
    keys = saved(writer, change.__name__)
    damaged, put = reader.count("not_brought_damaged"), reader.count("put")
    assert len(reader.store.find(keys)) == len(keys)  # the reader knows names and sizes
    change(redis.client(), names_of_chunks(redis.client()), random.Random(7))
    assert brought(reader, keys) == 0
    assert there(reader.own, keys) == 0, "nothing of it came into the pool"
    if change in (flip, zero):
        assert reader.count("not_brought_damaged") == damaged + len(keys)
        assert not names_of_chunks(redis.client()), "removed, so that it is put again"
        assert save(reader.own, keys) == len(keys)
        until(lambda: reader.count("put") == put + len(keys), "put again")


def test_without_a_seal_a_stranger_s_bytes_come_into_the_pool(
    new_host: NewHost, redis: RedisServer
) -> None:
    """The control: it is the seal that keeps them out."""
    writer, reader = new_host("a", keys=()), new_host("b", keys=())
    keys = saved(writer, "prompt")
    stranger = redis.client()
    for name in names_of_chunks(stranger):
        data = bytearray(stranger.get(name))
        data[-1] ^= 1
        stranger.set(name, bytes(data))
    assert all(reader.store.bring(key) for key in keys)
    assert not any(loads(reader.store, key) for key in keys)


def test_a_chunk_evicted_between_find_and_bring_is_a_miss(
    new_host: NewHost, redis: RedisServer
) -> None:
    writer, reader = new_host("a"), new_host("b")
    keys = saved(writer, "prompt")
    assert there(reader.store, keys) == len(keys)
    redis.client().flushall()
    with pytest.raises(PoolError) as raised:
        reader.store.bring(keys[0])
    assert raised.value.cause is Miss.EVICTED
    assert there(reader.store, keys) == 0


def test_a_host_without_room_says_so(new_host: NewHost) -> None:
    writer, reader = new_host("a"), new_host("b", memory=1 << 20)
    keys = saved(writer, "large", 1, nbytes=4 << 20)
    with pytest.raises(PoolError) as raised:
        reader.store.bring(keys[0])
    assert raised.value.cause is Miss.REFUSED


def test_a_stopped_server_costs_one_wait_and_then_none(
    new_host: NewHost, redis: RedisServer
) -> None:
    writer, reader = new_host("a"), new_host("b", deadline_s=0.25)
    keys = saved(writer, "prompt")
    until(lambda: there(reader.store, keys) == len(keys), "the reader knows them")
    redis.process.send_signal(signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        with pytest.raises(PoolError) as raised:
            reader.store.bring(keys[0])
        assert raised.value.cause is Miss.LATE
        assert time.monotonic() - began_s < 20.0
        began_s = time.monotonic()
        for _ in range(50):
            assert there(reader.store, keys) == 0
        assert time.monotonic() - began_s < 50 * 0.25 / 2, "the far store is left alone"
    finally:
        redis.process.send_signal(signal.SIGCONT)
    until(lambda: there(reader.store, keys) == len(keys), "it is used again")
    until(
        lambda: brought(reader, keys) == len(keys), "all are brought, however late an answer may be"
    )


def test_a_killed_client_is_started_anew(new_host: NewHost) -> None:
    writer, reader = new_host("a"), new_host("b")
    keys = saved(writer, "prompt")
    for child in reader.carrier.children():
        os.kill(child, signal.SIGKILL)
    until(lambda: brought(reader, keys) == len(keys), "chunks from a new client", 60)


def test_without_a_carrier_a_store_behaves_as_that_of_one_host(new_host: NewHost) -> None:
    host = new_host("a")
    keys = saved(host, "prompt")
    host.stop()
    try:
        assert there(host.store, keys) == len(keys)
        assert there(host.store, chain("other", 3)) == 0
        assert host.store.bring(chain("other", 1)[0]) is None
    finally:
        host.start()


def test_a_second_carrier_is_refused(new_host: NewHost) -> None:
    host = new_host("a")
    with pytest.raises(ConfigError, match="another carrier"):
        CarrierServer(host.carrier, host.folder)
    assert there(host.store, chain("x", 1)) == 0, "the first one still serves"


@pytest.mark.parametrize(
    "packet",
    [
        b"\xc1",
        b"x" * 70_000,
        encode(Find([b"k"])) + b"x",
        encode(Find([b"k"] * 5000)),
        encode(Bring([b""])),
    ],
    ids=["no message", "long", "trailing", "too many keys", "empty key"],
)
def test_a_bad_message_costs_its_sender_the_connection(new_host: NewHost, packet: bytes) -> None:
    host = new_host("a")
    with new_socket() as channel:
        channel.connect(str(host.folder / "carrier"))
        channel.settimeout(10)
        channel.sendall(packet)
        assert channel.recv(100) == b""
    assert host.store.carrier.status() is not None


def test_a_silent_carrier_costs_one_wait(
    new_host: NewHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "FIND_S", FIND_S)
    monkeypatch.setattr(asking, "SILENT_S", SILENT_S)
    host = new_host("a")
    host.stop()
    listener = new_socket()
    listener.bind(str(host.folder / "carrier"))
    listener.listen()
    try:
        time.sleep(1.1)
        with pytest.raises(PoolError) as raised:
            host.store.bring(chain("x", 1)[0])
        assert raised.value.cause is Miss.LATE
        began_s = time.monotonic()
        for _ in range(100):
            assert there(host.store, chain("x", 3)) == 0
        assert time.monotonic() - began_s < 100 * FIND_S / 2
    finally:
        listener.close()
        (host.folder / "carrier").unlink()
        host.start()


def test_a_store_knows_whether_other_hosts_are_behind_it(new_host: NewHost) -> None:
    host = new_host("a")
    assert host.store.reaches_far
    assert not host.own.reaches_far
    host.stop()
    assert host.store.reaches_far, "it may come back with chunks of before a reset"
    host.start()
