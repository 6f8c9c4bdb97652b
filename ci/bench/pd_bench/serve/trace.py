# SPDX-License-Identifier: Apache-2.0
"""Requests in the shape of a recorded trace, scaled down for small engines."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pd_bench.report import BenchError
from pd_connector.tools.launch.engine import PAGE_TOKENS

TO_GET_ONE = (
    "`curl -LO https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/conversation_trace.jsonl` "
    "gets one"
)
BLOCK_TOKENS = 512
"""Tokens for which an id of the trace stands."""
_LETTERS = string.ascii_lowercase + " "


@dataclass(frozen=True)
class TimedRequest:
    """One request of a run."""

    at_s: float  # after the run's start
    prompt: str
    max_tokens: int


class Line(msgspec.Struct):
    """One request of a trace in Mooncake's form."""

    timestamp: float  # ms
    input_length: int  # tokens
    output_length: int
    hash_ids: list[int]


def read(path: Path, requests: int) -> list[Line]:
    """The first `requests` requests of a trace in Mooncake's form (JSON lines).

    Raises:
        BenchError: the trace cannot be read, has another form, or is shorter.
    """
    try:
        with path.open("rb") as lines:
            numbered = enumerate(itertools.islice(lines, requests), 1)
            parsed = [_line(f"{path}, line {number}", text) for number, text in numbered]
    except OSError as error:
        raise BenchError(f"{path}: cannot be read ({error.strerror}); {TO_GET_ONE}") from None
    if len(parsed) < requests:
        raise BenchError(
            f"{path}: has {len(parsed)} requests and {requests} are needed; ask for fewer --requests "
            "or --rounds"
        )
    return parsed


def _line(place: str, text: bytes) -> Line:
    try:
        return msgspec.json.decode(text, type=Line)
    except msgspec.MsgspecError as error:
        raise BenchError(
            f"{place}: is not a trace in Mooncake's form ({error}); {TO_GET_ONE}"
        ) from None


def timed(lines: Sequence[Line], per_s: float, scale: float, seed: int) -> list[TimedRequest]:
    """These requests, `per_s` a second on average, with lengths divided by `scale`.

    Recorded times are binned, so each request is moved at random within its bin. Equal ids become equal text.
    Another seed gives other text, so that no run finds pages of an earlier run in a cache. Each letter is a token
    of the served model.
    """
    moves = random.Random(seed)
    bins = sorted({line.timestamp for line in lines})
    ends = dict(zip(bins, [*bins[1:], 2 * bins[-1] - bins[-2] if bins[1:] else 1.0], strict=True))
    moved = [(moves.uniform(line.timestamp, ends[line.timestamp]), line) for line in lines]
    moved.sort(key=lambda pair: pair[0])
    began, ended = moved[0][0], moved[-1][0]
    second = len(moved) / per_s / max(ended - began, 1e-9)
    return [
        TimedRequest(
            (at - began) * second,
            _text(line, scale, seed),
            max(2, round(line.output_length / scale)),
        )
        for at, line in moved
    ]


def _text(line: Line, scale: float, seed: int) -> str:
    letters = max(1, round(line.input_length / scale))
    block = max(1, round(BLOCK_TOKENS / scale))
    blocks = (
        "".join(random.Random(f"{seed} {name}").choices(_LETTERS, k=block))
        for name in line.hash_ids
    )
    return "".join(blocks)[:letters]


def longest(lines: Sequence[Line], scale: float) -> int:
    """Tokens of the longest request, in whole pages, with a page to spare."""
    most = max((line.input_length + line.output_length) / scale for line in lines)
    return (int(most) // PAGE_TOKENS + 2) * PAGE_TOKENS
