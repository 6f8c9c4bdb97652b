# SPDX-License-Identifier: Apache-2.0
"""Closed forms: the time of one engine that a mean request takes, in steady state.

They ignore bursts and cached prefixes. With bursts, the resulting rates are several times too high. So they are only
used to rank fleets, and never shown as results.
"""

from __future__ import annotations

from math import ceil, exp, inf, sqrt

from scheduler_plugins.cost.model import CostModel

FILL = 0.9
"""Part of the room for KV that sequences fill at the most. With more, sequences are preempted."""
MOST_BATCH = 256.0
"""The largest batch that counts if neither promise nor room bounds it: vLLM's default of `max_num_seqs`."""


def prompt_s(costs: CostModel, tokens: float, spread: float = 1.0) -> float:
    """Seconds of prefill for the mean request: `T_p` of P/D-Serve.

    Args:
        tokens: mean tokens that are computed for a prompt.
        spread: mean of the squared lengths, divided by the square of the mean.
    """
    # Short prompts share the steps of a busy engine.
    steps = tokens / costs.chunk_tokens if costs.chunk_tokens else 1.0
    return costs.c * steps + costs.a * tokens + costs.b * spread * tokens**2


def largest_batch(
    costs: CostModel, context: float, *, tpot_s: float, room_tokens: float = inf
) -> float:
    """The largest batch that keeps a promised time per token and the room for KV; at least 1.

    Args:
        context: mean tokens of a sequence.
        room_tokens: KV tokens that sequences can fill.
    """
    batch = min(MOST_BATCH, room_tokens / max(1.0, context))
    if each_s := costs.d1 + costs.d2 * context:
        batch = min(batch, (tpot_s - costs.d0) / each_s)
    return max(1.0, batch)


def token_s(costs: CostModel, context: float, batch: float) -> float:
    """Seconds of an engine for one token, in a batch of sequences of `context` tokens. Multiplied by an answer's tokens
    it is `T_d` of P/D-Serve."""
    return (costs.d0 + (costs.d1 + costs.d2 * context) * batch) / batch


def busy_part(engines: int, load: float) -> float:
    """Probability that all engines are busy (Erlang C). `load`: engines that the work keeps busy; 1 if they are too few."""
    if load >= engines:
        return 1.0
    blocked = 1.0  # Erlang B, by its recursion
    for n in range(1, engines + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked / (1 - load / engines * (1 - blocked))


def late_part(engines: int, load: float, each_s: float, squares: float, wait_s: float) -> float:
    """Fraction of the prompts that wait longer than `wait_s` for one of these engines. M/G/c queue: exponential tail of
    Erlang C, scaled for the variance of lengths.

    Args:
        load: engines that the work keeps busy.
        each_s: seconds of the mean prompt.
        squares: mean of the squared seconds, divided by the square of the mean; 1: all alike.
    """
    if load >= engines:
        return 1.0
    pace = 2 / (1 + max(0.0, squares - 1)) * (engines - load) / max(1e-9, each_s)
    return busy_part(engines, load) * exp(-pace * wait_s)


def mean_wait_s(engines: int, load: float, each_s: float, squares: float) -> float:
    """Mean seconds that a prompt waits; infinite if the engines are too few. Arguments as of `late_part`."""
    if load >= engines:
        return inf
    return busy_part(engines, load) * each_s * max(1.0, squares) / 2 / (engines - load)


def engines_for_prompts(
    load: float, each_s: float, squares: float, wait_s: float, late: float, most: int
) -> int:
    """The fewest engines, up to `most`, with which at most the fraction `late` of the prompts waits longer than
    `wait_s`."""
    engines = max(1, ceil(load))
    while engines < most and late_part(engines, load, each_s, squares, wait_s) > late:
        engines += 1
    return engines


def engines_for_answers(load: float, batch: float, deviations: float) -> float:
    """Engines whose batches hold the sequences of this load, and of its bursts: the number of sequences is Poisson.

    Args:
        load: engines that the sequences keep full, on average.
        batch: sequences of a full engine.
        deviations: standard deviations of the number of sequences that must fit.
    """
    return load + deviations * sqrt(load / max(1.0, batch))
