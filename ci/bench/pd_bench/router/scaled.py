# SPDX-License-Identifier: Apache-2.0
"""A trace with a sixteenth of its tokens, and engines that take the same time as for all tokens.

A router's decisions depend on shared prefixes and on times, not on the bytes of a token. So a machine of two cores can
run the client, the router and eight engines. Queues, hits and times equal the trace's, and bodies have 3 KB instead of
48.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.sim import trace
from scheduler_plugins.sim.links import Network
from scheduler_plugins.sim.mock.server import BYTES_PER_TOKEN
from scheduler_plugins.sim.simulate import CHUNK_TOKENS, COSTS

SCALE = 16
"""Divisor of prompts, and by default of answers. Shorter answers really are shorter, because the duration of their
steps does not change."""
BLOCK_TOKENS = trace.PAGE_SIZE // SCALE
CACHE_BLOCKS = 8000
NETWORK = Network()
BYTES_PER_S = NETWORK.bytes_per_s / SCALE
"""Rate of a link. The bytes of a token do not change."""
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Sent:
    """One request of the trace, as it is sent."""

    at_s: float  # in the trace's time, from 0 on
    prompt: str
    max_tokens: int
    tokens: int  # of the prompt


def whole_costs() -> CostModel:
    """The engines' cost model for the trace's own lengths."""
    return replace(COSTS, chunk_tokens=CHUNK_TOKENS)


def costs(speed: float = 1.0) -> CostModel:
    """The cost model for scaled lengths. With `speed`, it is in real seconds of engines that are faster by this
    factor."""
    whole = whole_costs()
    return replace(
        whole,
        a=whole.a * SCALE / speed,
        b=whole.b * SCALE**2 / speed,
        c=whole.c / speed,
        d0=whole.d0 / speed,
        d1=whole.d1 / speed,
        d2=whole.d2 * SCALE / speed,
        chunk_tokens=whole.chunk_tokens // SCALE,
    )


def read(path: Path, requests: int, rate: float = 1.0, answers: int = SCALE) -> list[Waiting]:
    """The first requests of a trace. Prompts keep their lengths, answers are divided by `answers`. Times begin at 0,
    are not binned, and are `rate` times as fast.

    Raises:
        TraceError: the file cannot be read, or has another form.
    """
    moved = trace.jittered(trace.load(path, requests), seed=0)
    begun_s = moved[0].arrival_s
    return [
        replace(
            request,
            arrival_s=(request.arrival_s - begun_s) / rate,
            max_tokens=max(1, request.max_tokens // answers),
        )
        for request in moved
    ]


def sent(requests: Sequence[Waiting]) -> list[Sent]:
    """The requests with their text: equal blocks have equal text."""
    return [_sent(request) for request in requests]


def _sent(request: Waiting) -> Sent:
    tokens = max(1, request.tokens // SCALE)
    shared = "".join(
        _text(f"block {block}", BLOCK_TOKENS * BYTES_PER_TOKEN) for block in request.block_hashes
    )
    size = tokens * BYTES_PER_TOKEN
    own = _text(f"own {request.id}", max(0, size - len(shared)))
    return Sent(request.arrival_s, (shared + own)[:size], request.max_tokens, tokens)


def _text(seed: str, size: int) -> str:
    return "".join(Random(seed).choices(_LETTERS, k=size))
