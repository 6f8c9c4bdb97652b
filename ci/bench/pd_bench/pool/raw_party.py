# SPDX-License-Identifier: Apache-2.0
"""Either process of `bench pool --raw`: puts objects into a store, or gets them into its own buffer.

It reads calls as lines of JSON from its input, and writes the seconds that each took to its output. It imports the standard
library only: another store's environment has nothing of ours.
"""

import contextlib
import ctypes
import json
import mmap
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

OBJECT_BYTES = 8 << 20
_STAMP_BYTES = 16


class Objects:
    """A buffer of objects, all different, whose bytes both processes know."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._memory = mmap.mmap(-1, count * OBJECT_BYTES)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._pattern = bytearray(random.Random(1).randbytes(OBJECT_BYTES))

    def at(self, place: int) -> memoryview:
        return self.view[place * OBJECT_BYTES : (place + 1) * OBJECT_BYTES]

    def fill(self, number: int) -> None:
        """Write the objects of this run."""
        for place in range(self.count):
            self.at(place)[:] = self._pattern_of(number, place)

    def wipe(self) -> None:
        ctypes.memset(self.address, 0, self.count * OBJECT_BYTES)

    def check(self, number: int) -> None:
        """Raises ValueError if an object is from another run."""
        for place in range(self.count):
            if self.at(place) != self._pattern_of(number, place):
                raise ValueError(f"object {place} of run {number} has wrong bytes")

    def _pattern_of(self, number: int, place: int) -> bytearray:
        stamp = number.to_bytes(8, "little") + place.to_bytes(8, "little")
        for start in range(0, OBJECT_BYTES, 1 << 20):
            self._pattern[start : start + _STAMP_BYTES] = stamp
        return self._pattern


class Ours:
    """The pool's store. A part has a head with the sums of its layers, as a chunk has."""

    HEAD_BYTES = 4096
    LAYER_BYTES = 1 << 20

    def __init__(self, objects: Objects, settings: dict[str, Any]) -> None:
        from pd_connector.pool.record import layer_sum
        from pd_connector.pool.store.base import Refusal
        from pd_connector.pool.store.local import LocalStore
        from pd_connector.pool.store.tier_storage import Space

        self._objects = objects
        self._sum, self._refusal = layer_sum, Refusal
        self._store = LocalStore(Space(Path(settings["folder"]), settings["budget"]))

    def put(self, number: int) -> None:
        parent = b""
        for place, key in enumerate(self._keys(number)):
            data = self._objects.at(place)
            writing = self._store.begin(
                key, parent=parent, part="0", parts=1, nbytes=self.HEAD_BYTES + OBJECT_BYTES
            )
            if isinstance(writing, self._refusal):
                raise ValueError(f"object {place} was refused: {writing.text}")
            with writing:
                sums = b""
                for row, layer in enumerate(self._layers(data)):
                    sums += self._sum(layer)
                    writing.write(self.HEAD_BYTES + row * self.LAYER_BYTES, layer)
                writing.write(0, memoryview(sums))
                if not writing.publish():
                    raise ValueError(f"object {place} was not kept")
            parent = key

    def get(self, number: int) -> None:
        keys = self._keys(number)
        if self._store.pin(keys, 60.0) < len(keys):
            raise ValueError("objects are missing")
        for place, key in enumerate(keys):
            data = self._objects.at(place)
            with self._store.read(key, "0") as reading:
                sums = reading.take(0, OBJECT_BYTES // self.LAYER_BYTES * len(self._sum(b"")))
                reading.into(data, self.HEAD_BYTES)
            if b"".join(map(self._sum, self._layers(data))) != sums:
                raise ValueError(f"object {place} differs from its sum")
        self._store.unpin(keys)

    def forget(self, number: int) -> None:
        self._store.remove(self._keys(number))

    def _layers(self, data: memoryview) -> list[memoryview]:
        return [data[at : at + self.LAYER_BYTES] for at in range(0, OBJECT_BYTES, self.LAYER_BYTES)]

    def _keys(self, number: int) -> list[bytes]:
        return [b"%016d%016d" % (number, place) for place in range(self._objects.count)]


class Files:
    """A plain file in a tmpfs for each object. Nothing is reserved, evicted, summed or verified."""

    def __init__(self, objects: Objects, settings: dict[str, Any]) -> None:
        self._objects = objects
        self._folder = Path(settings["folder"])

    def put(self, number: int) -> None:
        for place, path in enumerate(self._paths(number)):
            with open(path, "wb", buffering=0) as file:
                file.write(self._objects.at(place))

    def get(self, number: int) -> None:
        for place, path in enumerate(self._paths(number)):
            with open(path, "rb", buffering=0) as file:
                if file.readinto(self._objects.at(place)) != OBJECT_BYTES:
                    raise ValueError(f"{path} is short")

    def forget(self, number: int) -> None:
        for path in self._paths(number):
            path.unlink()

    def _paths(self, number: int) -> list[Path]:
        return [self._folder / f"{number}-{place}" for place in range(self._objects.count)]


class Copy:
    """One copy within a process, into memory that is there: what no store can beat."""

    def __init__(self, objects: Objects, settings: dict[str, Any]) -> None:
        self._objects = objects
        self._elsewhere = Objects(objects.count)

    def put(self, number: int) -> None:
        ctypes.memmove(
            self._elsewhere.address, self._objects.address, self._objects.count * OBJECT_BYTES
        )

    def get(self, number: int) -> None:
        self._elsewhere.fill(number)
        began = time.perf_counter()
        ctypes.memmove(
            self._objects.address, self._elsewhere.address, self._objects.count * OBJECT_BYTES
        )
        self.took_s = time.perf_counter() - began

    def forget(self, number: int) -> None:
        pass


class Mooncake:
    """Mooncake's store over TCP on this machine, with registered buffers. It verifies nothing."""

    def __init__(self, objects: Objects, settings: dict[str, Any]) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._objects = objects
        self._store = MooncakeDistributedStore()
        status = self._store.setup(
            {
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": str(settings["segment"]),
                "local_buffer_size": str(64 << 20),
                "protocol": "tcp",
                "master_server_addr": settings["master"],
            }
        )
        if status:
            raise ValueError(f"Mooncake's setup: status {status}")
        if status := self._store.register_buffer(objects.address, objects.count * OBJECT_BYTES):
            raise ValueError(f"Mooncake's register_buffer: status {status}")

    def put(self, number: int) -> None:
        statuses = self._store.batch_put_from(*self._arguments(number))
        if any(statuses):
            raise ValueError(f"Mooncake's batch_put_from: {statuses}")

    def get(self, number: int) -> None:
        sizes = self._store.batch_get_into(*self._arguments(number))
        if any(size != OBJECT_BYTES for size in sizes):
            raise ValueError(f"Mooncake's batch_get_into: {sizes}")

    def forget(self, number: int) -> None:
        for key in self._arguments(number)[0]:
            self._store.remove(key, True)

    def _arguments(self, number: int) -> tuple[list[str], list[int], list[int]]:
        places = range(self._objects.count)
        starts = [self._objects.address + place * OBJECT_BYTES for place in places]
        return [f"{number}-{place}" for place in places], starts, [OBJECT_BYTES] * len(places)


WAYS: dict[str, Any] = {"ours": Ours, "files": Files, "copy": Copy, "mooncake": Mooncake}


def main(way: str, count: str, settings: str) -> None:
    """Obey calls `[verb, number]` until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the store may print
    objects = Objects(int(count))
    objects.wipe()
    try:
        store = WAYS[way](objects, json.loads(settings))
        print(json.dumps(["", 0.0]), file=answers)
        for line in sys.stdin:
            verb, number = json.loads(line)
            print(json.dumps(["", _done(store, objects, verb, number)]), file=answers)
    except Exception as error:
        with contextlib.suppress(OSError):
            print(json.dumps([f"{type(error).__name__}: {error}", 0.0]), file=answers)
    answers.flush()
    os._exit(0)  # a store's threads may never end


def _done(store: Any, objects: Objects, verb: str, number: int) -> float:
    """Seconds that a call took. Filling and looking are outside the time."""
    if verb == "put":
        objects.fill(number)
    elif verb == "get":
        objects.wipe()
    began = time.perf_counter()
    getattr(store, verb)(number)
    took_s = getattr(store, "took_s", time.perf_counter() - began)
    if verb == "get":
        objects.check(number)
    return took_s


if __name__ == "__main__":
    main(*sys.argv[1:])
