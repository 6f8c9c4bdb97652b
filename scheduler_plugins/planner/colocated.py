# SPDX-License-Identifier: Apache-2.0
"""Engines that do both, with their chunk of prefill tuned: the rival of every disaggregated fleet."""

from __future__ import annotations

from itertools import product
from math import inf

from scheduler_plugins.planner.bound import Bounds
from scheduler_plugins.planner.goodput import Judge
from scheduler_plugins.planner.inventory import device_of
from scheduler_plugins.planner.mix import Mix, fits, mix_of, name_of, placed
from scheduler_plugins.planner.search import Candidate
from scheduler_plugins.router.policies.base import Role

CHUNKS = (1024, 2048, 512, 4096, 8192, 256)
"""Prompt tokens of a step, in the order in which they are tried."""
CACHED = 0.5
"""Part of the room for KV that the prefix cache has, where prompts share prefixes. An engine shares the room as it comes;
here it is divided once."""


def colocated(judge: Judge, bounds: Bounds) -> Candidate | None:
    """The best fleet whose engines do both: one tensor parallelism for each device, one chunk for all.

    The chunk is tuned on the mix with the highest closed-form rate first, then the mixes are tried with it.
    """
    inventory = bounds.inventory
    shares = any(request.block_hashes for window in judge.windows for request in window.requests)
    mixes = sorted(uniform(bounds), key=bounds.of, reverse=True)
    rival: Candidate | None = None

    def tried(mix: Mix, chunk: int, best: Candidate | None) -> Candidate | None:
        fleet = placed(mix, inventory, chunk_tokens=chunk, cached=CACHED if shares else 0.0)
        per_s = judge.goodput(fleet, best.per_s if best else 0.0) if fleet else 0.0
        if not fleet or not per_s:
            return best
        return Candidate(f"{name_of(mix)}, chunks of {chunk:,}", mix, fleet, per_s, 1, chunk)

    for mix in mixes[:1]:
        for chunk in CHUNKS:
            rival = tried(mix, chunk, rival)
    for mix in mixes[1:]:
        for chunk in (rival.chunk_tokens,) if rival else CHUNKS:
            rival = tried(mix, chunk, rival)
    if rival is not None and rival.mix != mixes[0]:
        for chunk in CHUNKS:
            rival = tried(rival.mix, chunk, rival) or rival
    return rival


def uniform(bounds: Bounds) -> list[Mix]:
    """Every choice of one tensor parallelism for each device, with as many engines as fit the GPUs and the budget.

    The budget goes first to the devices that serve most for it, by closed forms.
    """
    inventory = bounds.inventory
    choices = [list(inventory.of(device)) for device in inventory.devices if inventory.of(device)]
    mixes = list[Mix]()
    for kinds in product(*choices):
        counts, left = dict[tuple[str, Role], int](), inventory.most_cost
        for kind in sorted(
            kinds,
            key=lambda kind: bounds.rates[kind].whole / max(1e-9, inventory.cost(kind)),
            reverse=True,
        ):
            gpus, cost = inventory.kinds[kind].gpus, inventory.cost(kind)
            its = device_of(kind)
            number = sum(node.gpus // gpus for node in inventory.nodes if node.device == its)
            if cost and left < inf:
                number = min(number, int(left / cost))
                left -= number * cost
            counts[kind, Role.WHOLE] = number
        mix = mix_of(counts)
        if mix and fits(mix, inventory):
            mixes.append(mix)
    return list(dict.fromkeys(mixes))  # a budget may leave nothing for a device
