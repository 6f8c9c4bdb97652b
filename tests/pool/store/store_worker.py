# SPDX-License-Identifier: Apache-2.0
"""A process that saves and loads chunks until it is killed. Prints `saved KEY` for each chunk that it published, and `wrong KEY`
for each that it loaded with other bytes than were saved."""

import random
import sys
from pathlib import Path

from chunks import chain, content

from pd_connector.errors import PoolError
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.local import LocalStore, Space

CHAINS, DEPTH = 40, 6


def nbytes_of(key: bytes) -> int:
    """Bytes of a part, from its key."""
    return 1000 + key[0] * 300


def work(store: LocalStore, dice: random.Random) -> None:
    """One request: look up, load what is there, save the rest."""
    name = str(dice.randrange(CHAINS))
    keys, tenant = chain(name, dice.randint(1, DEPTH)), f"tenant {int(name) % 3}"
    found = store.find(keys)
    loaded = store.pin(keys[: sum(chunk is not None for chunk in found)], for_s=30)
    for key in keys[:loaded]:
        try:
            with store.read(key, "r0") as reading:
                if reading.take(0, reading.nbytes) != content(key, "r0", nbytes_of(key)):
                    print("wrong", key.hex(), flush=True)
        except PoolError:
            break
    store.unpin(keys[:loaded])
    for parent, key in zip([b"", *keys], keys, strict=False):
        nbytes = nbytes_of(key)
        writing = store.begin(key, parent=parent, part="r0", parts=1, nbytes=nbytes, tenant=tenant)
        if isinstance(writing, Refusal):
            continue
        with writing:
            data = memoryview(content(key, "r0", nbytes))
            half = nbytes // 2
            writing.write(half, data[half:])
            writing.write(0, data[:half])
            if dice.random() < 0.9 and writing.publish():
                print("saved", key.hex(), flush=True)
    if dice.random() < 0.05:
        store.remove(keys[-1:])


def main(memory: str, disk: str, memory_bytes: str, disk_bytes: str, seed: str) -> None:
    store = LocalStore(Space(Path(memory), int(memory_bytes)), Space(Path(disk), int(disk_bytes)))
    dice = random.Random(int(seed))
    print("ready", flush=True)
    while True:
        work(store, dice)


if __name__ == "__main__":
    main(*sys.argv[1:])
