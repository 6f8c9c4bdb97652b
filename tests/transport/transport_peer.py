# SPDX-License-Identifier: Apache-2.0
"""A transport's other end in a process of its own. Commands and answers are lines of JSON.

A consumer tells its address, reads producers' addresses, and tells every arrival. A producer tells
its address, reads a consumer's, and fills each of the consumer's slots once, slot n with bytes n;
it does so again for every further line. A watcher takes whatever is written, and at an empty line
tells which values the bytes of its landing slab have. Each ends with its standard input.
"""

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from transport_ends import End, drive


class Peer:
    """The process, seen from the test."""

    def __init__(self, role: str, kind: str) -> None:
        # UCX warns on standard output: answers get a descriptor of their own.
        answers, theirs = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, __file__, role, kind, str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
        )
        os.close(theirs)
        os.set_blocking(answers, False)
        self._answers = answers
        self._unfinished = b""
        self.answers: list[Any] = []
        drive(until=lambda: bool(self.listen()))
        self.address = bytes.fromhex(self.answers.pop(0))

    def tell(self, address: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(address.hex().encode() + b"\n")
        self.process.stdin.flush()

    def listen(self) -> list[Any]:
        """Every answer so far, with those that have come meanwhile."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._answers, 1 << 16)
            assert data, f"peer ended with {self.process.wait()}"
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            self.answers += [json.loads(line) for line in lines]
        return self.answers

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        os.close(self._answers)
        if self.process.stdin is not None:
            self.process.stdin.close()


def digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def _serve(role: str, kind: str, answers: int) -> None:
    end = End(kind) if role != "watcher" else End(kind, slot_bytes=8 << 20)

    def say(answer: Any) -> None:
        os.write(answers, json.dumps(answer).encode() + b"\n")

    say(end.transport.address().hex())
    while True:
        if select.select([sys.stdin], [], [], 0.0005)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            address = bytes.fromhex(line)
            if role == "consumer":
                end.transport.expect(address)
                say("expected")
            elif role == "watcher":
                if not address:
                    say(sorted(set(bytes(end.landing.slot(0, end.landing.nbytes)))))
            else:
                route = end.transport.connect(address)
                for slot in range(end.sending.slots):
                    payload = bytes([slot]) * end.sending.slot_bytes
                    end.send(route, b"%d" % slot, payload, slot, source=slot)
        end.poll()
        for arrival in end.landed:
            say([arrival.header.decode(), arrival.slot, digest(arrival.payload)])
        end.landed.clear()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
