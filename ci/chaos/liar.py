# SPDX-License-Identifier: Apache-2.0
"""A consumer whose messages fit the schema and are false."""

import random
import time
from collections.abc import Sequence
from typing import Self

import zmq

from pd_connector.control.keys import CurveKeys
from pd_connector.kv.geometry import Geometry
from pd_connector.kv.model import ModelFacts
from pd_connector.protocol.wire import messages

_HUGE = (1 << 63) - 1
_ANSWER_S = 5.0


class Liar:
    """One connection to a producer's control port, for a `with` block.

    Args:
        geometry: a geometry with which a session can be opened, so lies also come inside a session.
        choices: the random number generator.
        key: the shared key. Without it the producer ignores all messages.
    """

    def __init__(
        self, host: str, port: int, geometry: Geometry, choices: random.Random, key: str = ""
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        if key:
            CurveKeys.derive(key).present(self._socket)
        self._socket.connect(f"tcp://{host}:{port}")
        self._geometry = geometry
        self._random = choices

    def tell(self, names: Sequence[str], count: int) -> int:
        """Tell this many lies, some about transfers with these names, which belong to others. Returns the number
        received: all or none."""
        for _ in range(count):
            self._socket.send(messages.encode(self._lie([*names, "none", ""])))
            if self._random.random() < 0.05:  # bytes that fit no schema
                self._socket.send(self._random.randbytes(self._random.randrange(1, 400)))
        # Messages of one connection stay in order. So after its answer, all other messages have been received.
        self._socket.send(messages.encode(messages.AskRanks()))
        end = time.monotonic() + _ANSWER_S
        while self._socket.poll(max(0, int((end - time.monotonic()) * 1000))):
            if isinstance(messages.decode_producer_message(self._socket.recv()), messages.Ranks):
                return count
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=0)

    def _lie(self, names: Sequence[str]) -> messages.Message:
        name = self._random.choice(names)
        number = self._random.choice((0, 1, 7, 1 << 20, 1 << 31))
        slots = [
            self._random.choice((0, 1, 63, 1 << 31)) for _ in range(self._random.randrange(1, 6))
        ]
        lies = (
            self._hello,
            lambda: messages.Watch(name),
            lambda: messages.Open(
                transfer=name,
                identity=name.encode(),
                first_token=self._random.choice((0, 5, _HUGE)),
                stop_token=self._random.choice((0, 16, 1 << 40, _HUGE)),
                wait=self._random.random() < 0.5,
                slots=slots,
                chunk_bytes=self._random.choice((0, 1, 1 << 20, _HUGE)),
                readers=self._random.choice((1, 2, 1 << 16)),
                bytes_per_s=number,
                direct=self._random.random() < 0.5,
            ),
            lambda: messages.Credit(name, slots),
            lambda: messages.Taken(number),
            lambda: messages.Done(name),
            lambda: messages.Cancel(name, self._random.choice(("aborted", "no such cause"))),
            lambda: messages.Heartbeat([name] * self._random.randrange(1, 50)),
        )
        return self._random.choice(lies)()

    def _hello(self) -> messages.Message:
        good = self._random.random() < 0.5
        return messages.Hello(
            newest=messages.SCHEMA if good else self._random.choice((0, _HUGE)),
            oldest=messages.OLDEST_SCHEMA if good else 0,
            engine_id="liar",
            expected_engine_id="",
            facts=ModelFacts(b"config" if good else b"", b"weights"),
            geometry=self._geometry,
            codecs=["raw"],
            transports={"tcp2": self._random.randbytes(30), "shm": self._random.randbytes(30)},
            readable=["shm", "tcp2", "nixl"],
        )
