# SPDX-License-Identifier: Apache-2.0
"""Two hosts with Mooncake between them, and a stranger: a program for a network namespace of its own, because Mooncake listens on
all addresses. Prints what it has found as JSON."""

import json
import os
from pathlib import Path
from typing import Any

from chunks import chain, loads, save, there

from pd_connector.errors import PoolError
from pd_connector.pool.carrier import asking
from support.far_hosts import KEY, Host
from support.mooncake_masters import client, mooncake_master, own_folder
from support.waits import until

MASTER = 7951
ADDRESS = f"mooncake://127.0.0.1:{MASTER}"


def be_patient() -> None:
    """From now on this program waits for a carrier as long as a busy machine takes."""
    for name in ("FIND_S", "SILENT_S", "BRING_S"):
        setattr(asking, name, 30.0)


def brought(host: Host, keys: list[bytes]) -> tuple[int, int]:
    """Chunks that came, and those of them that are wrong."""
    came = wrong = 0
    for key in keys:
        try:
            found = host.store.bring(key)
        except PoolError:
            continue
        if found:
            came, wrong = came + 1, wrong + (not loads(host.store, key))
    return came, wrong


def scene(folder: Path, keys_of_hosts: tuple[bytes, ...]) -> dict[str, Any]:
    writer, reader = (
        Host(folder / name, ADDRESS, keys_of_hosts, 64 << 20, 5.0).ready() for name in "ab"
    )
    try:
        keys = chain(f"prompt {bool(keys_of_hosts)}", 6)
        save(writer.own, keys, nbytes=300_000)
        until(lambda: writer.count("put") == len(keys), "the chunks in Mooncake", 60)
        told = {"found": there(reader.store, keys), "first": brought(reader, keys[:3])}
        stranger = client(MASTER)
        for key in keys[3:]:
            name = "pd:" + reader.carrier._seal.names(key)[0]
            data = bytearray(stranger.get(name))
            data[-1] ^= 1
            stranger.remove(name, True)
            assert stranger.put(name, bytes(data)) == 0
        told["changed"] = brought(reader, keys[3:])
        told["damaged"] = reader.count("not_brought_damaged")
        told["left"] = there(reader.store, keys)
        stranger.close()
        return told
    finally:
        writer.close()
        reader.close()


def main() -> None:
    be_patient()
    with own_folder() as folder, mooncake_master(MASTER, "--metrics_port", "7952"):
        lender = client(MASTER, 128 << 20)
        found = {
            "sealed": scene(folder / "sealed", (KEY,)),
            "plain": scene(folder / "plain", ()),
        }
        lender.close()
        print("FOUND " + json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
