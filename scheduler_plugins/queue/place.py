# SPDX-License-Identifier: Apache-2.0
"""Where a request stands in the queue."""

from __future__ import annotations

from scheduler_plugins.order.request import BlockHash, Waiting


class Place:
    """Where a request stands. Belongs to the queue; nothing else changes it."""

    __slots__ = (
        "bucket",
        "cached",
        "cost_s",
        "evictions",
        "found",
        "group",
        "key",
        "lane",
        "missing",
        "push",
        "request",
        "resumed",
        "seq",
        "stay",
        "usable",
    )

    def __init__(self, request: Waiting, block_tokens: int) -> None:
        self.request = request
        self.usable = min(len(request.block_hashes), max(0, request.tokens - 1) // block_tokens)
        """Blocks whose KV may be taken from the cache: the last token is always computed."""
        self.lane = ""
        self.seq = 0
        """Place in the lane by arrival."""
        self.group = 0
        self.key = 0.0
        self.cost_s = 0.0
        self.cached = 0
        """Leading blocks that were cached when it was last evaluated."""
        self.missing: BlockHash | None = None
        """The hash under which it waits for a block to be cached."""
        self.found: BlockHash | None = None
        """The last of its leading blocks that were cached when it was last evaluated."""
        self.evictions = -1
        """Evictions there had been when its blocks were last looked up."""
        self.resumed = False
        """Whether it was preempted: it goes first, and its class has paid for it."""
        self.bucket = 0
        """Bucket of its cost in `WorkByCost`."""
        self.push = 0
        """Number of its valid entry by key; 0 if it does not wait."""
        self.stay = 0
        """Number of its valid entry by arrival; 0 if it does not wait."""
