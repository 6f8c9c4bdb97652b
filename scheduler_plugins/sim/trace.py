# SPDX-License-Identifier: Apache-2.0
"""Recorded workloads."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import IO, Annotated, AnyStr

import msgspec

from scheduler_plugins.order.request import Waiting

PAGE_SIZE = 512
LONGEST_LINE, MOST_BYTES = 1 << 20, 256 << 20
"""Bytes of a line, and of all lines that are read: about a million requests. A file can be endless."""
MOST_TOKENS = 100_000_000
"""A longer prompt or answer is a mistake: this is ten times the longest context of today's models."""


class TraceError(ValueError):
    """A file that is not a trace; the message names the line."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[int]


def load(path: Path, limit: int | None = None) -> list[Waiting]:
    """Read a trace. If its name ends with `.csv`, it has Azure's form, otherwise Mooncake's.

    Raises:
        TraceError: the file cannot be read, or a line does not have that form.
    """
    return read_azure(path, limit) if path.suffix == ".csv" else read(path, limit)


def read(path: Path, limit: int | None = None) -> list[Waiting]:
    """Read a trace in Mooncake's form, in the order of arrival.

    One JSON object a line: `timestamp` in ms, `input_length` and `output_length` in tokens, and
    `hash_ids`, one for each 512 tokens of the prompt, a partial last block included. Equal ids mean
    equal prefixes.

    Raises:
        TraceError: the file cannot be read, or a line does not have that form.
    """
    decoder = msgspec.json.Decoder(_Line)
    requests: list[Waiting] = []
    n = 0
    try:
        with path.open("rb") as lines:
            for n, text in enumerate(_lines(path, lines)):
                if limit is not None and len(requests) >= limit:
                    break
                if text.strip():
                    requests.append(_request(n, decoder.decode(text)))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(f"{path}, line {n + 1}: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from None
    if not requests:
        raise TraceError(f"{path}: is empty; a trace has one JSON object a line")
    return sorted(requests, key=lambda request: request.arrival_s)


def read_azure(path: Path, limit: int | None = None) -> list[Waiting]:
    """Read a trace in the form of Azure's LLM inference traces, in the order of arrival.

    Comma-separated: `TIMESTAMP` in ISO form, `ContextTokens`, `GeneratedTokens`. Prefixes are unknown, so prompts share
    nothing.

    Raises:
        TraceError: the file cannot be read, or a line does not have that form.
    """
    requests: list[Waiting] = []
    n = 1
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            for n, row in enumerate(csv.DictReader(_lines(path, lines)), 2):
                if limit is not None and len(requests) >= limit:
                    break
                at = datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=UTC)
                tokens, more = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                if min(tokens, more) < 0:
                    raise ValueError("tokens below 0")
                if max(tokens, more) > MOST_TOKENS:
                    raise ValueError(f"more than {MOST_TOKENS:,} tokens")
                requests.append(
                    Waiting(
                        id=str(n - 2),
                        tokens=max(1, tokens),
                        block_hashes=(),
                        arrival_s=at.timestamp(),
                        max_tokens=max(1, more),
                        priority=max(1, tokens),
                    )
                )
    except TraceError:
        raise
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        columns = "TIMESTAMP,ContextTokens,GeneratedTokens"
        raise TraceError(
            f"{path}, line {n}: {type(error).__name__}: {error}; wanted are {columns}"
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from None
    if not requests:
        raise TraceError(f"{path}: is empty; a trace has one request a line")
    begun_s = min(request.arrival_s for request in requests)
    shifted = [replace(each, arrival_s=each.arrival_s - begun_s) for each in requests]
    return sorted(shifted, key=lambda request: request.arrival_s)


def _lines(path: Path, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """The lines of a file, which may have no end.

    Raises:
        TraceError: a line is longer than `LONGEST_LINE`, or all are longer than `MOST_BYTES`.
    """
    n = size = 0
    while line := file.readline(LONGEST_LINE + 1):
        n, size = n + 1, size + len(line)
        if len(line) > LONGEST_LINE:
            raise TraceError(
                f"{path}, line {n}: begins with {line[:12]!r} and is longer than {LONGEST_LINE:,} bytes; a trace has one "
                "request a line"
            )
        if size > MOST_BYTES:
            raise TraceError(
                f"{path}, line {n}: at most {MOST_BYTES:,} bytes are read; give a part of it, such as its busiest hour"
            )
        yield line


def jittered(requests: Sequence[Waiting], seed: int) -> list[Waiting]:
    """The same requests with times that are not binned, in the order of arrival.

    Recorded times can be coarse (Mooncake's have steps of 3 s). So each time is moved at random, at most up to the next
    different time.
    """
    random = Random(seed)
    times = sorted({request.arrival_s for request in requests})
    following = dict(zip(times, [*times[1:], times[-1]], strict=True))
    moved = [
        replace(each, arrival_s=random.uniform(each.arrival_s, following[each.arrival_s]))
        for each in requests
    ]
    return sorted(moved, key=lambda each: each.arrival_s)


def at_rate(requests: Sequence[Waiting], per_s: float, seed: int) -> list[Waiting]:
    """The same requests, faster or slower, with `per_s` a second on average; see `jittered`."""
    moved = jittered(requests, seed)
    begun_s = moved[0].arrival_s
    scale = len(requests) / per_s / max(moved[-1].arrival_s - begun_s, 1e-9)
    return [replace(request, arrival_s=(request.arrival_s - begun_s) * scale) for request in moved]


def one_after_another(traces: Sequence[Sequence[Waiting]]) -> list[Waiting]:
    """Traces as one: each begins at the last arrival of the trace before it.

    Ids are unique, and prompts of different traces share no prefix.
    """
    joined, begins_s = list[Waiting](), 0.0
    for n, requests in enumerate(traces):
        first_s = requests[0].arrival_s
        joined += [
            replace(
                request,
                id=f"{n}/{request.id}",
                arrival_s=request.arrival_s - first_s + begins_s,
                block_hashes=[(n, block) for block in request.block_hashes],
            )
            for request in requests
        ]
        begins_s = joined[-1].arrival_s
    return joined


def _request(n: int, line: _Line) -> Waiting:
    return Waiting(
        id=str(n),
        tokens=max(1, line.input_length),
        block_hashes=line.hash_ids[: line.input_length // PAGE_SIZE],
        arrival_s=line.timestamp / 1e3,
        max_tokens=max(1, line.output_length),
        priority=line.input_length,
    )
