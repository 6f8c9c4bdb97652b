# SPDX-License-Identifier: Apache-2.0
"""A transport's other end in a process of its own, forked from one that has imported the transports.

A consumer tells its address, is told producers' addresses, and tells every arrival. A producer tells
its address, is told a consumer's, and fills each of the consumer's slots once, slot n with bytes n;
it does so again whenever it is told the address again. A watcher takes whatever is written, and if told an empty
address, tells which values the bytes of its landing slab have. Each ends when its pipe is closed.
"""

import hashlib
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from support.children import FORKS
from transport_ends import End, drive


class Peer:
    """The process, seen from the test."""

    def __init__(self, role: str, kind: str) -> None:
        self._pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=_serve, args=(role, kind, theirs))
        self.process.start()
        theirs.close()
        self.answers: list[Any] = []
        drive(until=lambda: bool(self.listen()))
        self.address = bytes.fromhex(self.answers.pop(0))

    def tell(self, address: bytes) -> None:
        self._pipe.send(address)

    def listen(self) -> list[Any]:
        """Every answer so far, with those that have come meanwhile."""
        while self._pipe.poll():
            self.answers.append(self._pipe.recv())
        return self.answers

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()
        self.process.close()
        self._pipe.close()


def digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def _serve(role: str, kind: str, pipe: Connection) -> None:
    end = End(kind) if role != "watcher" else End(kind, slot_bytes=8 << 20)
    pipe.send(end.transport.address().hex())
    while True:
        if pipe.poll(0.0005):
            try:
                address = pipe.recv()
            except EOFError:
                return
            if role == "consumer":
                end.transport.expect(address)
                pipe.send("expected")
            elif role == "watcher":
                if not address:
                    pipe.send(sorted(set(bytes(end.landing.slot(0, end.landing.nbytes)))))
            else:
                route = end.transport.connect(address)
                for slot in range(end.sending.slots):
                    payload = bytes([slot]) * end.sending.slot_bytes
                    end.send(route, b"%d" % slot, payload, slot, source=slot)
        end.poll()
        for arrival in end.landed:
            pipe.send([arrival.header.decode(), arrival.slot, digest(arrival.payload)])
        end.landed.clear()
