# SPDX-License-Identifier: Apache-2.0
"""The number of prompt tokens of a step, and the part reserved for requests that overtake."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.waiting import LOOKS_PER_PEEK, WaitingQueue

STEP_OVERHEAD = 0.1
"""Largest fixed cost of a short step, relative to the cost of its prompt tokens. All classes that share the engine pay
this overhead."""
MOST_CUT = 8
"""Divisor: a short step has at least 1/8 of the tokens that the engine allows. The measured fixed cost may be wrong.
Even so, steps must not become tiny."""
MOST_SHARED = 2
"""Divisor: at most 1/2 of a step goes to requests that overtake a running prefill, so it at most
doubles."""


def step_tokens(queue: WaitingQueue, most_tokens: int, prefilling: Iterable[str]) -> int:
    """Prompt tokens for the step that is scheduled now. If classes share the engine, there are fewer.

    Args:
        most_tokens: the most tokens that the engine allows in a step.
        prefilling: the classes of the running prefills.
    """
    model = queue.estimator.model
    if not model.known or not queue.fair_share.wants_short_steps(prefilling):
        return most_tokens
    return max(model.step_tokens(STEP_OVERHEAD, most_tokens), most_tokens // MOST_CUT)


def tokens_before(
    queue: WaitingQueue, prefill: Waiting, computed_tokens: int, budget_tokens: int
) -> int:
    """Prompt tokens of the next requests that go before the rest of a running prefill.

    Shortest remaining work first, if the policy says so; else 0.

    Args:
        computed_tokens: computed tokens of the prefill's prompt, cached tokens included.
        budget_tokens: the step's tokens. Requests that together need more than 1/`MOST_SHARED` of them are left out.
    """
    head = queue.head if queue.policy.overtakes_running else None
    if head is None or not queue.fair_share.outranks(head.class_name, prefill.qos):
        return 0
    key, tokens = queue.estimator.left(prefill, computed_tokens), 0
    upcoming = queue.class_queue(head.class_name).upcoming()
    others = (entry for entry in upcoming if entry is not head)
    for entry in islice(chain((head,), others), LOOKS_PER_PEEK):
        if entry.key >= key:
            break
        fresh = entry.request.tokens - queue.estimator.known_tokens(entry.request)
        if tokens + fresh > budget_tokens // MOST_SHARED:
            break
        tokens += fresh
    return tokens
