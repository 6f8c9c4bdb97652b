# SPDX-License-Identifier: Apache-2.0
"""The form of a fuzzer's input: a list of steps, each of which one target takes.

A step is one byte (its kind), two bytes (the length of its data, little-endian) and its data.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

MOST_STEPS = 48
MOST_DATA = (1 << 16) - 1


class Kind(IntEnum):
    """What is done with a step's data. The first group goes to `control.ControlTarget`."""

    CONSUMER_SAYS = 0  # which consumer, then a frame for the producer's side
    PRODUCER_SAYS = 1  # which producer, then a frame for the consumer's side
    CHUNK_LANDS = 2  # landing slot, whether its checksum is right, then a chunk's header
    WRITE_ENDS = 3  # whether it went well
    TIME_PASSES = 4  # how long
    ENGINE = 5  # a command, a transfer, an argument
    CONNECTION_BREAKS = 6  # to which producer

    DIAL = 7  # whether with a right code, then a dialler's first bytes
    DIALLER_SENDS = 8  # bytes to the producer's data port
    DIALLER_RECORD = 9  # a record's kind, then its body: sealed where there is a key
    LISTENER_SENDS = 10  # bytes to a consumer that has dialled
    LISTENER_RECORD = 11
    LOBBY = 12  # how many descriptors, then bytes to the lobby of shared memory
    NOTE = 13  # bytes over a link of shared memory that stands

    PARAMS = 14  # `kv_transfer_params`, as msgpack


class Step(NamedTuple):
    kind: Kind
    data: bytes


def read(script: bytes) -> list[Step]:
    """The steps of an input. Any bytes are an input; what is left over at the end is passed over."""
    steps: list[Step] = []
    at = 0
    while at + 3 <= len(script) and len(steps) < MOST_STEPS:
        stop = at + 3 + int.from_bytes(script[at + 1 : at + 3], "little")
        steps.append(Step(Kind(script[at] % len(Kind)), script[at + 3 : stop]))
        at = stop
    return steps


def write(steps: Iterable[Step]) -> bytes:
    """The input that has these steps."""
    parts: list[bytes] = []
    for kind, data in steps:
        kept = data[:MOST_DATA]
        parts += [bytes([kind]), len(kept).to_bytes(2, "little"), kept]
    return b"".join(parts)
