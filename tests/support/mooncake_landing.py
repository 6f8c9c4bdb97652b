# SPDX-License-Identifier: Apache-2.0
"""A stranger who writes into the memory in which a reader's objects land, while it reads them from Mooncake: a program for a network
namespace of its own. Prints what the reader has found as JSON."""

import ctypes
import json
import mmap
import os
import secrets
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pd_connector.errors import PoolError
from pd_connector.pool.far.mooncake import MooncakeStore
from pd_connector.pool.far.seal import HEADER, Seal
from support.mooncake_masters import client, mooncake_master, own_folder
from support.waits import until

MASTER = 7971
KEY = b"k" * 32
CHUNK = b"c" * 32
NBYTES = 300_000
ROUNDS = 20
_LISTENS = "0A"
_TARGET = struct.Struct("<QQQ")
"""Where the stranger writes, how many bytes, and how often he has done so."""

_STRANGER = """
import mmap, secrets, sys
from mooncake.engine import TransferEngine
from support.mooncake_landing import _TARGET
reader, path = sys.argv[1:]
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
own = engine.allocate_managed_buffer(1 << 20)
engine.write_bytes_to_buffer(own, b"\\xff" * (1 << 20), 1 << 20)
with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
    print("ready", flush=True)
    while True:
        address, nbytes, done = _TARGET.unpack_from(shared)
        if address and engine.transfer_sync_write(reader, own, address, nbytes) == 0:
            shared[16:24] = (done + 1).to_bytes(8, "little")
"""


_WRITTEN = b"\xff" * 32
"""How his writes end."""


class Stranger:
    """His process: he writes again and again to where he is sent."""

    def __init__(self, reader: str, folder: Path) -> None:
        path = folder / "target"
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 0)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _STRANGER, reader, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        until(lambda: "ready" in self.process.stdout.readline(), "the stranger", 60)

    @property
    def written(self) -> int:
        """How often he has written."""
        return int(_TARGET.unpack_from(self._shared)[2])

    def aim(self, address: int, nbytes: int) -> None:
        """Where he writes from now on; 0: nowhere."""
        self._shared[:16] = struct.pack("<QQ", address, nbytes)

    def strike(self, address: int, nbytes: int) -> None:
        """Have him write there, in this process's memory, at least once as a whole."""
        self.aim(address, nbytes)
        end = (
            address + nbytes - len(_WRITTEN)
        )  # his client counts what it has sent, not what has come
        until(
            lambda: ctypes.string_at(end, len(_WRITTEN)) == _WRITTEN, "what the stranger writes", 60
        )
        self.aim(0, 0)


class Landing:
    """Mooncake's client of the reader.

    Attributes:
        struck: whether the stranger writes between the end of a transfer and the copy out of the client's memory.
    """

    def __init__(self, own: Any, stranger: Stranger) -> None:
        self._own, self._stranger = own, stranger
        self.struck, self.at = True, (0, 0)

    def get_buffer(self, key: str) -> Any:
        handle = self._own.get_buffer(key)
        # Behind the head, which anybody can read and leave as it is.
        self.at = handle.ptr() + HEADER.size, handle.size() - HEADER.size
        if self.struck:
            self._stranger.strike(*self.at)
        return handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def listeners() -> set[int]:
    """Ports of this namespace at which somebody listens over IPv4."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS}


def read(store: MooncakeStore, seal: Seal, contents: bytes) -> str:
    """What a reader makes of one object."""
    (name, *_) = seal.names(CHUNK)
    room = bytearray(seal.sealed_bytes(len(contents)))
    assert store.get([name], [memoryview(room)]) == [len(room)]
    try:
        opened = seal.open(name, memoryview(room))
    except PoolError:
        return "damaged"
    return "right" if opened == contents else "wrong"


def opened_in_place(store: Any, seal: Seal, contents: bytes, stranger: Stranger) -> str:
    """The control: a reader that leaves what it has opened in the memory where it landed."""
    (name, *_) = seal.names(CHUNK)
    handle = store._client._own.get_buffer("pd:" + name)
    with memoryview(handle) as data:
        opened = seal.open(name, data.cast("B"))
    ctypes.memmove(handle.ptr(), bytes(opened), len(opened))
    stranger.strike(handle.ptr(), len(opened))
    return "right" if ctypes.string_at(handle.ptr(), len(contents)) == contents else "wrong"


def put(store: MooncakeStore, seal: Seal, contents: bytes) -> None:
    (name, *_) = seal.names(CHUNK)
    room = bytearray(seal.sealed_bytes(len(contents)))

    def fill(buffer: memoryview, offset: int) -> None:
        buffer[:] = contents[offset : offset + len(buffer)]

    seal.seal(name, len(contents), fill, memoryview(room))
    assert store.put([name], [memoryview(room)]) == [True]


def scene(folder: Path) -> dict[str, list[str]]:
    before = listeners()
    store: Any = MooncakeStore(urlsplit(f"mooncake://127.0.0.1:{MASTER}"), 5.0)
    (port,) = listeners() - before  # where a client says which memory it has
    sealed, plain, contents = Seal((KEY,)), Seal(), secrets.token_bytes(NBYTES)
    for seal in (sealed, plain):
        put(store, seal, contents)
    stranger = Stranger(f"127.0.0.1:{port}", folder)
    landing = store._client = Landing(store._client, stranger)
    try:
        # First what needs memory in which nothing lands that was sent earlier.
        landing.struck = False
        found = {
            "left alone": [read(store, sealed, contents)],
            "in place": [opened_in_place(store, sealed, contents, stranger)],
        }
        landing.struck = True
        found |= {
            "struck": [read(store, sealed, contents) for _ in range(ROUNDS)],
            "plain": [read(store, plain, contents)],
        }
        landing.struck = False
        read(store, sealed, contents)  # it says where it lands
        stranger.aim(*landing.at)  # he writes without end while it reads
        already = stranger.written
        found["meanwhile"] = []
        while stranger.written < already + ROUNDS or len(found["meanwhile"]) < ROUNDS:
            found["meanwhile"].append(read(store, sealed, contents))
        return found
    finally:
        stranger.process.kill()
        stranger.process.wait()


def main() -> None:
    with own_folder() as folder, mooncake_master(MASTER, "--metrics_port", "7972"):
        lender = client(MASTER, 64 << 20)
        print("FOUND " + json.dumps(scene(folder)), flush=True)
        lender.close()
    os._exit(0)


if __name__ == "__main__":
    main()
