# SPDX-License-Identifier: Apache-2.0
"""Workloads made from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from scheduler_plugins.order.request import Waiting


def shared_profiles(
    seed: int,
    *,
    users: int = 20,
    posts: int = 50,
    profile_tokens: tuple[int, int] = (1100, 1700),
    post_tokens: int = 15,
    page_size: int = 16,
) -> list[Waiting]:
    """PrefillOnly's recommendation workload: every post is judged with every user's profile before
    it, in one token. The paper's profiles have 11,000 to 17,000 tokens and its posts 150; a tenth
    of that by default.

    Returns:
        `users` x `posts` requests in random order, all arriving at 0; see `poisson`.
    """
    random = Random(seed)
    requests = []
    for user in range(users):
        profile = random.randint(*profile_tokens)
        for post in range(posts):
            tokens = profile + post_tokens
            shared = profile // page_size
            hashes: list[tuple[int, ...]] = [(user, n) for n in range(shared)]
            hashes += [(user, n, post) for n in range(shared, tokens // page_size)]
            requests.append(
                Waiting(
                    id=f"{user}-{post}",
                    tokens=tokens,
                    block_hashes=hashes,
                    arrival_s=0.0,
                    max_tokens=1,
                    priority=tokens,
                )
            )
    random.shuffle(requests)
    return requests


def lengths(
    seed: int,
    count: int,
    *,
    median_tokens: int = 800,
    max_tokens: int = 1,
) -> list[Waiting]:
    """Prompts that share nothing, of log-normal length, all arriving at 0."""
    random = Random(seed)
    requests, longest = [], 16 * median_tokens
    for n in range(count):
        tokens = round(random.lognormvariate(0.0, 0.8) * median_tokens)
        tokens = max(2, min(longest, tokens))
        first = (seed * count + n) * longest
        requests.append(
            Waiting(
                id=f"{seed}-{n}",
                tokens=tokens,
                block_hashes=range(first, first + tokens // 16),
                arrival_s=0.0,
                max_tokens=max_tokens,
            )
        )
    return requests


def poisson(requests: Sequence[Waiting], per_s: float, seed: int, qos: str = "") -> list[Waiting]:
    """The same requests, arriving at random, `per_s` a second on average."""
    random = Random(seed)
    now_s, timed = 0.0, []
    for request in requests:
        now_s += random.expovariate(per_s)
        timed.append(replace(request, arrival_s=now_s, qos=qos or request.qos))
    return timed


def merged(*streams: Sequence[Waiting]) -> list[Waiting]:
    """Several streams as one. Ids get the number of their stream, so they stay unique."""
    named = [
        replace(request, id=f"{n}/{request.id}")
        for n, stream in enumerate(streams)
        for request in stream
    ]
    return sorted(named, key=lambda request: request.arrival_s)


def conversations(
    seed: int,
    count: int,
    *,
    open_at_once: int = 30,
    turns: int = 5,
    turn_blocks: tuple[int, int] = (2, 12),
    page_size: int = 16,
) -> list[Waiting]:
    """Chats: every prompt is the conversation so far and a new turn. Ended conversations never come back.

    Args:
        count: requests, one a second.
        open_at_once: conversations that take turns in random order.
        turns: mean number of turns of a conversation.
        turn_blocks: fewest and most blocks that a turn adds.
    """
    random = Random(seed)
    requests = []
    opened: list[list[tuple[int, ...]]] = [[] for _ in range(open_at_once)]
    started = 0
    for n in range(count):
        which = random.randrange(open_at_once)
        if not opened[which] or random.random() < 1 / turns:
            opened[which] = [(0,)]  # a system prompt that all share
            started += 1
        own = opened[which]
        own += [(started, len(own) + k) for k in range(random.randint(*turn_blocks))]
        requests.append(
            Waiting(
                id=f"turn-{n}",
                tokens=len(own) * page_size + 1,
                block_hashes=list(own),
                arrival_s=float(n),
                max_tokens=1,
            )
        )
    return requests
