# SPDX-License-Identifier: Apache-2.0
"""One post of an engine core: its load, and counts by class; and the form in which it lies in a file."""

from __future__ import annotations

import struct
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec

from scheduler_plugins.admission.load import LoadReport

TTFT_BUCKETS_S = (
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
)  # fmt: skip
"""Upper bounds of the buckets of `Histogram`. One more bucket takes larger values."""


class Histogram(msgspec.Struct):
    """The number of durations in each of the buckets `TTFT_BUCKETS_S`, since the start."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TTFT_BUCKETS_S) + 1))
    """Count of each bucket, not cumulative."""
    sum_s: float = 0.0

    def observe(self, duration_s: float) -> None:
        """Count a duration. A clock that was set back makes it negative; then it counts as 0, because sums only grow."""
        duration_s = max(0.0, duration_s)
        self.counts[bisect_left(TTFT_BUCKETS_S, duration_s)] += 1
        self.sum_s += duration_s


class ClassRecord(msgspec.Struct):
    """Counts for the requests of one class since the engine started."""

    predicted_ttft: Histogram = msgspec.field(default_factory=Histogram)
    """TTFT predicted when a request reached the scheduler; only for requests that had a first token."""
    ttft: Histogram = msgspec.field(default_factory=Histogram)
    """From arrival at the API server to the engine's first token, for the same requests."""


class Posted(msgspec.Struct, frozen=True, kw_only=True):
    """One post."""

    pid: int
    """Process that wrote the post."""
    namespace: int = 0
    """PID namespace of that process; 0: not known."""
    started: int = 0
    """`start_ticks` of that process; 0: not known."""
    written_s: float
    """Time of the post, by the machine's monotonic clock, which all its processes share."""
    idle: bool
    """Nothing waits and nothing runs. The post is valid until there is another post."""
    step_s: float = 0.0
    """Predicted duration of the running step. There is no post before its end."""
    report: LoadReport
    classes: dict[str, ClassRecord] = {}
    """By the name of the class."""


_ENCODER = msgspec.msgpack.Encoder()


_DECODER = msgspec.msgpack.Decoder(Posted)


_SEAL = struct.Struct("<II")  # bytes of the post, their CRC-32


_READS = 3


def sealed(posted: Posted) -> bytes:
    """The bytes of a file with this post."""
    post = _ENCODER.encode(posted)
    return _SEAL.pack(len(post), crc32(post)) + post


def read_post(path: Path) -> Posted | None:
    """The post in a file; None if there is no complete post."""
    for _ in range(_READS):
        with suppress(OSError, struct.error, msgspec.MsgspecError):
            data = path.read_bytes()
            size, checksum = _SEAL.unpack_from(data)
            # If an earlier post was longer, its rest lies behind this post.
            post = data[_SEAL.size : _SEAL.size + size]
            if len(post) == size and crc32(post) == checksum:
                return _DECODER.decode(post)
    return None
