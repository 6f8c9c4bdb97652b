# SPDX-License-Identifier: Apache-2.0
"""Closed forms: the time of one engine that a mean request takes, in steady state.

Bursts and cached prefixes are not in them. In bursts the rates that follow are several times too high, so they order
fleets and are never shown as results.
"""

from __future__ import annotations

from math import inf

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
    """Seconds of an engine for one token, in a batch of sequences of `context` tokens. Times the tokens of an answer it
    is `T_d` of P/D-Serve."""
    return (costs.d0 + (costs.d1 + costs.d2 * context) * batch) / batch
