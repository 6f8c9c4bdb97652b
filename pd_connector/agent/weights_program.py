# SPDX-License-Identifier: Apache-2.0
"""The program that reads all bytes of a checkpoint, started by `weights_reader`.

It is a process of its own, with a lower priority than the engine. A thread of the engine's process with a lower priority
would keep Python's lock (GIL) while it waits for a processor, and the engine would wait for it.

Standard input: one line, a JSON list of the cache's file or null, and of the files as pairs of path and inherited
descriptor. At the end of standard input the program ends: the engine is gone. Standard output: lines `read` and the number
of bytes that are known so far; at the end a line `weights` and the fingerprint in hex.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from pd_connector.kv.checkpoint_files import OpenFile
from pd_connector.kv.weights import fingerprint

_NICE = 10
"""With this priority a process gets about a tenth of a processor that another one wants whole, so it ends there, too."""
_TELL_S = 0.2


def main() -> None:
    os.nice(_NICE)
    cache, files = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_engine, daemon=True).start()
    opened = [OpenFile(Path(path), descriptor) for path, descriptor in files]
    weights = fingerprint(opened, Path(cache) if cache else None, _Progress().add)
    print("weights", weights.hex())


class _Progress:
    """Prints the number of bytes read, now and then. Several threads can add to it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes, self._next_s = 0, 0.0

    def add(self, nbytes: int) -> None:
        """Count more bytes as known."""
        with self._lock:
            self._nbytes += nbytes
            if time.monotonic() >= self._next_s:
                self._next_s = time.monotonic() + _TELL_S
                print("read", self._nbytes, flush=True)


def _end_with_the_engine() -> None:
    sys.stdin.read()
    os._exit(1)
