# SPDX-License-Identifier: Apache-2.0
"""A client dies in the middle of a put, and another one puts the same object: a program for a network namespace of its own. Prints
what it has seen as JSON."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from pd_connector.pool.far.mooncake import MooncakeStore
from support.mooncake_masters import mooncake_master, own_folder
from support.mooncake_site import ADDRESS, MASTER
from support.waits import until

_METRICS = 7952
_NAME, _DATA = "a" * 64, bytes(8 << 20)
_CLIENT = """
import sys
from support.mooncake_masters import client
from support.mooncake_site import MASTER
made = client(MASTER, int(sys.argv[1]))
print("READY", flush=True)
key = sys.stdin.readline().strip()
made.put(key, bytes(8 << 20))
sys.stdin.readline()
"""


@contextmanager
def client_process(lent: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Another client, which puts an object under the name that it is told."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-c", _CLIENT, str(lent)], **pipes)
    try:
        assert process.stdout
        assert any(b"READY" in line for line in process.stdout)
        yield process
    finally:
        process.kill()
        process.wait()


def puts_begun() -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{_METRICS}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (count,) = [line for line in lines if line.startswith("master_put_start_requests_total ")]
    return float(count.split()[1]) > 0


def main() -> None:
    with (
        own_folder(),
        mooncake_master(MASTER, "--metrics_port", str(_METRICS)),
        client_process(64 << 20) as node,
        client_process(0) as dies,
    ):
        store = MooncakeStore(urlsplit(ADDRESS), 5.0)
        node.send_signal(signal.SIGSTOP)
        assert dies.stdin
        dies.stdin.write(f"pd:{_NAME}\n".encode())
        dies.stdin.flush()
        until(puts_begun, "the put")
        dies.kill()
        dies.wait()
        node.send_signal(signal.SIGCONT)
        seen = {
            "answer of Mooncake": store._client.put(f"pd:{_NAME}", _DATA),
            "taken": store.put([_NAME], [memoryview(_DATA)]),
            "there": store.has([_NAME]),
        }
        until(lambda: store.put([_NAME], [memoryview(_DATA)]) == [True], "it is taken", 90)
        seen["afterwards"] = store.has([_NAME])
        print("SEEN " + json.dumps(seen), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
