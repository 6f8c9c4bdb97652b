# SPDX-License-Identifier: Apache-2.0
"""A trace with a sixteenth of its tokens, and engines that take as long for them as for the whole.

What a router does depends on prompts as they share prefixes and on times, not on how many bytes a
token has. So a machine of two cores can carry the client, the router and eight engines: queues, hits
and times are those of the trace, and bodies are of 3 KB instead of 48.
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
from scheduler_plugins.sim.mock.prompts import BYTES_PER_TOKEN
from scheduler_plugins.sim.simulate import CHUNK_TOKENS, COSTS

SCALE = 16
"""Prompts are divided by this, and answers unless asked otherwise. Shorter answers are indeed shorter:
their steps take what they always took."""
BLOCK_TOKENS = trace.PAGE_SIZE // SCALE
CACHE_BLOCKS = 8000
NETWORK = Network()
BYTES_PER_S = NETWORK.bytes_per_s / SCALE
"""Rate of a link: a token has as many bytes as ever."""
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
    """The same for scaled lengths; with `speed`, in real seconds of engines that are so much faster."""
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
    """The first requests of a trace: prompts of their own lengths, answers divided by `answers`, times
    from 0 on that are not binned and come `rate` times as fast.

    Raises:
        TraceError: the file cannot be read, or has another form.
    """
    moved = trace.jittered(trace.load(path, requests), seed=0)
    begun_s = moved[0].arrival_s
    return [
        replace(
            one,
            arrival_s=(one.arrival_s - begun_s) / rate,
            max_tokens=max(1, one.max_tokens // answers),
        )
        for one in moved
    ]


def sent(requests: Sequence[Waiting]) -> list[Sent]:
    """The requests with their text: equal blocks have equal text."""
    return [_sent(one) for one in requests]


def _sent(one: Waiting) -> Sent:
    tokens = max(1, one.tokens // SCALE)
    shared = "".join(
        _text(f"block {block}", BLOCK_TOKENS * BYTES_PER_TOKEN) for block in one.block_hashes
    )
    size = tokens * BYTES_PER_TOKEN
    own = _text(f"own {one.id}", max(0, size - len(shared)))
    return Sent(one.arrival_s, (shared + own)[:size], one.max_tokens, tokens)


def _text(seed: str, size: int) -> str:
    return "".join(Random(seed).choices(_LETTERS, k=size))
