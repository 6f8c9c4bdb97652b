# SPDX-License-Identifier: Apache-2.0
"""The pool across hosts beside its far store alone: CPU time, bytes read, and waits, with a Redis server of its own on loopback.

CPU time is that of all client processes, so other work on the machine changes it little. Ours runs as it is shipped: hosts with
`pd-connector pool carry`, each with its clients in processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from pd_bench.pool.folders import own_folder
from pd_bench.report import BenchError, Compared, Comparison, Say
from pd_bench.sample import Sample
from pd_bench.serve.hosts import MOONCAKE, REDIS, key_file, need_store
from pd_connector.errors import PoolError
from pd_connector.pool.carrier.client import FarClient
from pd_connector.pool.far.seal import Seal, read_keys
from pd_connector.pool.record import layer_sum
from pd_connector.pool.settings import SHM_VARIABLE, memory_folder
from pd_connector.pool.store.base import Refusal, Store
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.reaching import ReachingStore
from pd_connector.pool.store.tier_storage import Space

OBJECT_BYTES = 8 << 20
LAYER_BYTES = 1 << 20
HEAD_BYTES = 4096
BARS = {"put": 2.0, "get": 1.5, "verified": 3.0, "once": 4.1, "silent": 1.0}
ROWS = ("cpu", "bytes", "once", "silent")
"""What can be measured, each alone."""
HITS = {"hits": REDIS, "hits-mooncake": MOONCAKE}
"""Rows that play a trace, and the far store of each. They are measured only if they are named."""
_HOSTS, _REQUESTS, _PREFIX_CHUNKS = 4, 64, 8
_LONGEST_WAIT_S = 0.25
_STARTS_S = 60.0


class Server:
    """A Redis server that keeps nothing on a disk."""

    def __init__(self, folder: Path) -> None:
        need_store(REDIS)
        import redis

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        quiet = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--dir", str(folder))
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), *quiet],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.client: Any = redis.Redis(port=self.port, socket_timeout=_STARTS_S)
        _until(lambda: _answers(self.client.ping), "the Redis server")

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def sent_bytes(self) -> int:
        """Bytes that clients have read so far."""
        return int(self.client.info("stats")["total_net_output_bytes"])

    def received_bytes(self) -> int:
        """Bytes that clients have sent so far."""
        return int(self.client.info("stats")["total_net_input_bytes"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Host:
    """A host's pool with its carrier, which is a process.

    Args:
        address: of the far store.
        prefix: words before the carrier's command.
    """

    def __init__(
        self, folder: Path, address: str, key: Path, budget: int, prefix: Sequence[str] = ()
    ) -> None:
        folder.mkdir()
        memory = memory_folder({SHM_VARIABLE: str(folder)})
        memory.parent.mkdir(mode=0o700)
        self.own = LocalStore(Space(memory, budget))
        self.store = ReachingStore(self.own, memory)
        command = [*prefix, sys.executable, "-m", "pd_connector", "pool", "carry"]
        environment = {**os.environ, SHM_VARIABLE: str(folder), "PD_CONNECTOR_FAR": address}
        with (folder / "carrier.log").open("ab") as log:
            self.carrier = subprocess.Popen(
                [*command, "--key-file", str(key)], env=environment, stdout=log, stderr=log
            )
        _until(self._is_ready, f"the carrier (see {folder}/carrier.log)")

    def _is_ready(self) -> bool:
        status = self.store.carrier.status()
        return status is not None and not status.problem and len(_children(self.carrier.pid)) == 3

    def cpu_s(self) -> float:
        """CPU time of the carrier and its clients so far, in seconds."""
        return sum(map(_cpu_s, (self.carrier.pid, *_children(self.carrier.pid))))

    def put(self) -> int:
        """Chunks that the carrier has put so far."""
        status = self.store.carrier.status()
        return status.counts.get("put", 0) if status else 0

    def save(self, keys: Sequence[bytes], data: Sequence[memoryview]) -> None:
        """Save chunks, each with a head of its layers' sums, and wait until they are in the far store."""
        before, parent = self.put(), b""
        for key, each in zip(keys, data, strict=True):
            writing = self.own.begin(
                key, parent=parent, part="0", parts=1, nbytes=HEAD_BYTES + OBJECT_BYTES
            )
            if isinstance(writing, Refusal):
                raise BenchError(f"a chunk was refused: {writing.text}")
            with writing:
                writing.write(HEAD_BYTES, each)
                writing.write(0, memoryview(b"".join(map(layer_sum, _layers(each)))))
                if not writing.publish():
                    raise BenchError("a chunk was not kept")
            parent = key
        _until(lambda: self.put() >= before + len(keys), "the chunks in the far store")

    def load(self, key: bytes, buffer: memoryview) -> None:
        """From the far store into a buffer, verified. Raises BenchError."""
        try:
            if self.store.bring(key) is None:
                raise BenchError("a chunk did not come from the far store")
            with self.store.read(key, "0") as reading:
                sums = reading.take(0, OBJECT_BYTES // LAYER_BYTES * len(layer_sum(b"")))
                reading.into(buffer, HEAD_BYTES)
        except PoolError as error:
            raise BenchError(f"a chunk did not come from the far store: {error}") from None
        if b"".join(map(layer_sum, _layers(buffer))) != sums:
            raise BenchError("a chunk differs from its sums")

    def load_all(self, keys: Sequence[bytes], buffer: memoryview) -> None:
        """Load chunks, one after another. Raises BenchError."""
        for key in keys:
            self.load(key, buffer)

    def close(self) -> None:
        self.carrier.terminate()
        self.carrier.wait(_STARTS_S)
        self.store.close()


def chosen(text: str, more: Sequence[str]) -> list[str]:
    """The rows that `--far` names.

    Args:
        more: rows of engines.

    Raises:
        BenchError: there is no such row.
    """
    names = [*ROWS, *more]
    rows = names if text == "all" else text.split(",")
    names = [*names, *HITS]
    if unknown := [row for row in rows if row not in names]:
        raise BenchError(f"--far {unknown[0]}: must be all, or some of {', '.join(names)}")
    return rows


def measure(
    rows: Sequence[str], objects: int, runs: int, warm_ups: int, say: Say
) -> list[Compared]:
    """Measure these rows of `ROWS`.

    Args:
        objects: of one run.

    Raises:
        BenchError: a chunk did not come, or is wrong.
    """
    tables = []
    with own_folder() as folder, contextlib.ExitStack() as opened:
        key = key_file(folder)
        server = Server(folder)
        opened.callback(server.close)

        def hosts(count: int, budget: int) -> Iterator[Host]:
            for _ in range(count):
                host = Host(folder / secrets.token_hex(4), server.address, key, budget)
                opened.callback(host.close)
                yield host

        if "cpu" in rows:
            budget = (warm_ups + runs) * objects * (OBJECT_BYTES + (1 << 20))
            writer, reader = hosts(2, budget)
            seal = Seal(read_keys(key))
            tables.append(
                ("raw calls", _cpu(server, writer, reader, seal, objects, runs, warm_ups, say))
            )
        if "bytes" in rows:
            from pd_bench.pool import far_bytes  # imports torch

            tables.append(
                ("bytes of KV", far_bytes.measure(_put_bytes(server, *hosts(1, 1 << 30)), say))
            )
        if "once" in rows:
            tables.append(("one host", [_once(server, list(hosts(_HOSTS + 2, 1 << 30)), say)]))
        if "silent" in rows:
            tables.append(("limit", [_silent(server, list(hosts(2, 1 << 30)), say)]))
    return tables


def _cpu(
    server: Server,
    writer: Host,
    reader: Host,
    seal: Seal,
    objects: int,
    runs: int,
    warm_ups: int,
    say: Say,
) -> list[Comparison]:
    import redis

    raw: Any = redis.Redis(port=server.port, socket_timeout=_STARTS_S)
    client = FarClient("bench", server.address, _STARTS_S)
    try:
        _until(lambda: client.is_ready, "a far client")
        room = bytearray(os.urandom(objects * OBJECT_BYTES))
        data = [
            memoryview(room)[start : start + OBJECT_BYTES]
            for start in range(0, len(room), OBJECT_BYTES)
        ]
        buffer = memoryview(bytearray(OBJECT_BYTES))
        times: dict[str, list[float]] = {}
        for number in range(warm_ups + runs):
            keys = [b"%016d%016d" % (number, place) for place in range(objects)]
            for place, each in enumerate(data):
                each[:16] = keys[place][:16]
            run = {
                "raw put": _spent(lambda: _raw_put(raw, data)),
                "raw get": _spent(lambda: _raw_get(raw, objects)),
                "put": _spent(lambda keys=keys: writer.save(keys, data), writer, own=False),  # type: ignore[misc]
                "get": _spent(lambda keys=keys: _opened(client, seal, keys), client),  # type: ignore[misc]
                "verified": _spent(
                    lambda keys=keys: reader.load_all(keys, buffer),  # type: ignore[misc]
                    reader,
                ),
            }
            shown = ", ".join(
                f"{name} {seconds / objects * 1e3:.2f}" for name, seconds in run.items()
            )
            say(f"{'warm-up' if number < warm_ups else 'run'}, CPU ms an object: {shown}")
            if number >= warm_ups:
                for name, seconds in run.items():
                    times.setdefault(name, []).append(seconds / objects * 1e3)
            names = [f"pd:{seal.names(key)[0]}" for key in keys]
            server.client.delete(*names, *(f"raw {place}" for place in range(objects)))
            for host in (writer, reader):
                host.own.remove(keys)
    finally:
        client.close()
        raw.close()
    params = {"MiB": OBJECT_BYTES >> 20, "objects": objects}

    def compared(name: str, ours: str, baseline: str) -> Comparison:
        mine, other = (Sample(tuple(times[side])) for side in (ours, baseline))
        return Comparison(name, params, mine, other, "ms CPU", BARS[ours])

    return [
        compared("read, seal, put", "put", "raw put"),
        compared("get, open", "get", "raw get"),
        compared("far to verified", "verified", "raw get"),
    ]


def _spent(
    step: Callable[[], object], ours: Host | FarClient | None = None, *, own: bool = True
) -> float:
    """CPU seconds of a step: of this process, unless it only has others work, and of the processes behind `ours`."""

    def spent() -> float:
        if isinstance(ours, FarClient):
            return _cpu_s(ours.pid)
        return ours.cpu_s() if ours else 0.0

    others, here = spent(), time.process_time()
    step()
    return (time.process_time() - here if own else 0.0) + spent() - others


def _raw_put(client: Any, data: Sequence[memoryview]) -> None:
    for place, each in enumerate(data):
        client.set(f"raw {place}", each)


def _raw_get(client: Any, objects: int) -> None:
    for place in range(objects):
        if len(client.get(f"raw {place}")) != OBJECT_BYTES:
            raise BenchError("Redis has lost an object")


def _opened(client: FarClient, seal: Seal, keys: Sequence[bytes]) -> None:
    names = [seal.names(key)[0] for key in keys]
    opened = []
    for name, size in zip(names, client.has(names), strict=True):

        def take(place: int, data: memoryview, name: str = name) -> None:
            if data:
                opened.append(len(seal.open(name, data)))

        client.get([name], [size], take)
    if len(opened) != len(keys) or min(opened, default=0) < OBJECT_BYTES:
        raise BenchError("an object did not come from the far store")


def _put_bytes(server: Server, host: Host) -> Callable[[Callable[[Store], Sequence[bytes]]], float]:
    """For `far_bytes.measure`."""

    def put(save: Callable[[Store], Sequence[bytes]]) -> float:
        chunks, before = host.put(), server.received_bytes()
        keys = save(host.own)
        _until(lambda: host.put() >= chunks + len(keys), "the chunks in the far store")
        return server.received_bytes() - before

    return put


def _once(server: Server, hosts: Sequence[Host], say: Say) -> Comparison:
    """Requests at once on one prefix that only the far store has: bytes that four hosts read, beside one host with one request."""
    writer, alone, *others = hosts
    room = memoryview(bytearray(Random(2).randbytes(OBJECT_BYTES)))
    keys = [b"%032d" % place for place in range(_PREFIX_CHUNKS)]
    writer.save(keys, [room] * len(keys))

    def load(host: Host) -> None:
        buffer = memoryview(bytearray(OBJECT_BYTES))
        host.store.prefetch(keys)
        for key in keys:
            host.load(key, buffer)

    def read_bytes(of: Sequence[Host], requests: int) -> float:
        before = server.sent_bytes()
        with ThreadPoolExecutor(requests) as threads:
            list(threads.map(load, (of[number % len(of)] for number in range(requests))))
        return (server.sent_bytes() - before) / 1e6

    single, spread = read_bytes([alone], 1), read_bytes(others, _REQUESTS)
    say(
        f"bytes read, MB: one host {single:.1f}, {len(others)} hosts with {_REQUESTS} requests {spread:.1f}"
    )
    params = {"requests": _REQUESTS, "hosts": len(others)}
    return Comparison(
        "bytes read", params, Sample((spread,)), Sample((single,)), "MB", BARS["once"]
    )


def _silent(server: Server, hosts: Sequence[Host], say: Say) -> Comparison:
    """A stopped server: the longest wait of a request's look-up and load, both together, of twenty requests."""
    writer, reader = hosts
    room = memoryview(bytearray(Random(3).randbytes(OBJECT_BYTES)))
    keys = [b"s%031d" % place for place in range(4)]
    writer.save(keys, [room] * len(keys))
    _until(lambda: all(reader.store.find(keys)), "the chunks, found")
    server.process.send_signal(signal.SIGSTOP)
    waits = []
    try:
        for number in range(20):
            began_s = time.perf_counter()
            if reader.store.find(keys)[0] is not None:
                with contextlib.suppress(PoolError):
                    reader.store.bring(keys[0])
            waits.append(time.perf_counter() - began_s)
            time.sleep(0.1)
            if number == 4:
                say(
                    f"server stopped, waits of the first five requests, s: {[round(w, 3) for w in waits]}"
                )
    finally:
        server.process.send_signal(signal.SIGCONT)
    limit = Sample((_LONGEST_WAIT_S,))
    return Comparison(
        "longest wait", {"requests": 20}, Sample((max(waits),)), limit, "s", BARS["silent"]
    )


def _layers(data: memoryview) -> list[memoryview]:
    return [data[at : at + LAYER_BYTES] for at in range(0, OBJECT_BYTES, LAYER_BYTES)]


def _cpu_s(pid: int) -> float:
    """CPU time of another process, in seconds: Linux' clock of a process."""
    return time.clock_gettime((~pid << 3) | 2)


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    return pids


def _answers(call: Callable[[], object]) -> bool:
    try:
        return bool(call())
    except Exception:  # it is still being started
        return False


def _until(condition: Callable[[], object], what: str) -> None:
    until_s = time.monotonic() + _STARTS_S
    while not condition():
        if time.monotonic() > until_s:
            raise BenchError(f"not within {_STARTS_S:g} s: {what}")
        time.sleep(0.1)
