# SPDX-License-Identifier: Apache-2.0
"""Costs of the router's index of cached blocks: bytes per block, time per prompt, and the longest stop while it
fills."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, thread_time

import numpy as np

from pd_bench.report import Comparison
from pd_bench.sample import Sample
from scheduler_plugins.router.index.blocks import BlockIndex
from scheduler_plugins.router.index.events import Batch, BlockName, Stored
from scheduler_plugins.router.index.hashes import Hashes
from scheduler_plugins.router.index.held import HeldBlocks

MOST_BYTES = 100.0
MATCH_LIMIT_S = 200e-6
STOP_LIMIT_S = 5e-3
"""The most time for one batch of events, including the growth of the table."""
PROMPTS = (24, 256, 1000, 5000)
"""Blocks of the prompts that are looked up. Conversations have 24 blocks of 512 tokens on average."""
_AT_ONCE = 500


def compare(engines: int, blocks: int, rounds: int = 200) -> list[Comparison]:
    """Fill the index by events, then look prompts up.

    Args:
        engines: each has blocks that no other engine has, which is the worst case for memory.
        blocks: blocks of each engine. Blocks have few tokens here, which changes neither figure.
    """
    index = BlockIndex()
    engine_names = [f"engine{n}" for n in range(engines)]
    held = [HeldBlocks(index, name) for name in engine_names]
    random, stop_s = np.random.default_rng(0), 0.0
    for first in range(0, blocks, _AT_ONCE):
        for n, held_index in enumerate(held):
            names: list[BlockName] = [int(name) for name in random.integers(1, 2**63, _AT_ONCE)]
            tokens = [n, first] * _AT_ONCE
            batch = Batch(0.0, [Stored(names, None, tokens, 2)])
            # CPU time, so that other programs on the machine do not count.
            begin = thread_time()
            held_index.apply(batch)
            stop_s = max(stop_s, thread_time() - begin)
    taken = index.nbytes + sum(held_index.nbytes for held_index in held)
    where = {"engines": engines, "blocks": blocks}
    comparisons = [
        Comparison(
            "memory of a block",
            {**where, "against": "allowed"},
            Sample((taken / (engines * blocks),)),
            Sample((MOST_BYTES,)),
            "B",
            1.0,
        ),
        Comparison(
            f"longest batch of {_AT_ONCE} blocks, CPU time",
            {**where, "against": "allowed"},
            Sample((stop_s * 1e3,)),
            Sample((STOP_LIMIT_S * 1e3,)),
            "ms",
            1.0,
        ),
    ]
    for length in PROMPTS:
        times = _match_times(index, engine_names, length, rounds)
        comparisons.append(
            Comparison(
                f"match of {length} blocks",
                {**where, "against": "allowed"},
                Sample((sorted(times)[len(times) // 2] * 1e6,)),
                Sample((MATCH_LIMIT_S * 1e6,)),
                "us",
                1.0,
            )
        )
    return comparisons


def _match_times(index: BlockIndex, names: Sequence[str], length: int, rounds: int) -> list[float]:
    """Seconds of each look-up of a prompt. Every engine has another share of it."""
    prompt: Hashes = np.random.default_rng(length).integers(1, 2**63, length).tolist()
    for n, name in enumerate(names):
        index.store(name, prompt[: length * (n % 8) // 8])
    times = []
    for _ in range(rounds):
        begin = perf_counter()
        index.match(prompt, names)
        times.append(perf_counter() - begin)
    return times
