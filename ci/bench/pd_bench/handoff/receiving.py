# SPDX-License-Identifier: Apache-2.0
"""The cost of receiving to a decode engine: CPU time, and tokens of an answer that it decodes meanwhile.

Prompts that the prefill engine has in its cache are handed over again and again. So almost nothing is computed beside
the transfer.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from pd_bench.handoff.pair import Pair

TRANSFERS = 3
"""Handoffs of one measurement."""


class Receiving(NamedTuple):
    """Measurements of one pair, several times."""

    cpu_s_per_gb: tuple[float, ...]  # of both engines, per GB of KV in their caches
    tokens_per_s: tuple[float, ...]  # of a long answer that is decoded meanwhile


def measure_receiving(
    pair: Pair, prompt: Sequence[int], other: Sequence[int], runs: int
) -> Receiving:
    """Hand over one prompt many times.

    Args:
        prompt: the prompt to hand over.
        other: prompt of the long answer.
        runs: number of measurements of each kind.
    """
    salt = uuid.uuid4().hex
    pair.run(prompt, salt)  # from now on the prefill engine has it cached
    cpu = [_cpu_s(pair, prompt, salt) / (TRANSFERS * pair.kv_gb(len(prompt))) for _ in range(runs)]
    with pair.decoding(other) as times:
        rates = [_rate(pair, prompt, salt, times) for _ in range(runs)]
    return Receiving(tuple(cpu), tuple(rates))


def _cpu_s(pair: Pair, prompt: Sequence[int], salt: str) -> float:
    before = pair.cpu_seconds()
    for _ in range(TRANSFERS):
        pair.run(prompt, salt)
    return pair.cpu_seconds() - before


def _rate(pair: Pair, prompt: Sequence[int], salt: str, times: Sequence[float]) -> float:
    before, started = len(times), time.perf_counter()
    for _ in range(TRANSFERS):
        pair.run(prompt, salt)
    return (len(times) - before) / (time.perf_counter() - started)
