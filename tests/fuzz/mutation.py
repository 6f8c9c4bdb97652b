# SPDX-License-Identifier: Apache-2.0
"""Changes that a script survives as a script, and a message as a message."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fuzz.script import MOST_STEPS, Kind, Step, read, write

_NUMBERS = (0, 1, 2, 3, 7, 15, 16, 63, 255, 1 << 16, 1 << 20, 1 << 31, 1 << 32, (1 << 63) - 1, -1)
_TEXTS = ("", "t0", "t1", "t2", "t3", "shm", "tcp2", "raw", "int8", "model", "x" * 600, "é", "\0")
_BYTES = (b"", b"tokens", b"model", bytes(8), bytes(16), b"\xff" * 8)
_PREFIXED = (Kind.CONSUMER_SAYS, Kind.PRODUCER_SAYS, Kind.CHUNK_LANDS)
_PACKED = (*_PREFIXED, Kind.PARAMS)

Mutate = Callable[[bytes, int], bytes]
"""Changes any bytes; the result has at most this length."""


class Mutator:
    """Args:
    known: scripts to take steps from.
    mutate: what changes bytes that are not messages.
    """

    def __init__(self, known: Sequence[bytes], mutate: Mutate) -> None:
        self._steps = [step for script in known for step in read(script)]
        self._mutate = mutate

    def __call__(self, script: bytes, most: int, seed: int) -> bytes:
        """A changed script of `most` bytes at most."""
        chance = random.Random(seed)
        steps = read(script)
        for _ in range(chance.choice((1, 1, 2, 4))):
            self._change(steps, chance)
        while len(changed := write(steps)) > most:
            steps.pop()
        return changed

    def _change(self, steps: list[Step], chance: random.Random) -> None:
        at = chance.randrange(len(steps)) if steps else 0
        what = chance.randrange(10)
        if not steps or (what == 0 and len(steps) < MOST_STEPS):
            steps.insert(at, chance.choice(self._steps))
        elif what == 1:
            steps.insert(at, steps[chance.randrange(len(steps))])
            del steps[MOST_STEPS:]
        elif what == 2:
            del steps[at]
        elif what == 3:
            other = chance.randrange(len(steps))
            steps[at], steps[other] = steps[other], steps[at]
        else:
            steps[at] = self._changed(steps[at], chance)

    def _changed(self, step: Step, chance: random.Random) -> Step:
        kind, data = step
        if kind in _PACKED and chance.random() < 0.8:
            start = int(kind in _PREFIXED)
            try:
                message = msgspec.msgpack.decode(data[start:])
                packed = msgspec.msgpack.encode(_altered(message, chance))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
                pass
            else:
                return Step(kind, data[:start] + packed)
        return Step(kind, self._mutate(data or b"\0", 4096))


def _altered(value: Any, chance: random.Random) -> Any:
    """The same with one thing in it changed."""
    if isinstance(value, dict) and value and chance.random() < 0.95:
        key = chance.choice([*value])
        changed = dict(value)
        if chance.random() < 0.1:
            del changed[key]
        else:
            changed[key] = _altered(value[key], chance)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        match chance.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value + value[at:]
            case _:
                return [*value[:at], _altered(value[at], chance), *value[at + 1 :]]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = value + chance.choice((-1, 1))
        return max(-(1 << 63), min((1 << 64) - 1, chance.choice((near, *_NUMBERS))))
    if isinstance(value, str):
        return chance.choice(_TEXTS) if chance.random() < 0.8 else value + "x"
    if isinstance(value, bytes):
        return _altered_bytes(value, chance)
    return chance.choice((None, True, 0, 1, "t0", b"", [], {}, 0.5))


def _altered_bytes(value: bytes, chance: random.Random) -> bytes:
    """A header or an address within a message is changed as a message is, at times."""
    if len(value) > 8 and chance.random() < 0.5:
        try:
            inner = msgspec.msgpack.decode(value)
            if isinstance(inner, list):
                return msgspec.msgpack.encode(_altered(inner, chance))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
            pass
    if not value or chance.random() < 0.5:
        return chance.choice(_BYTES)
    at = chance.randrange(len(value))
    return value[:at] + bytes([value[at] ^ 1 << chance.randrange(8)]) + value[at + 1 :]
