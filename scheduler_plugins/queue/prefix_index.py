# SPDX-License-Identifier: Apache-2.0
"""The waiting requests that gain when a block is cached, and the present cost of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.request import BlockHash, Waiting
from scheduler_plugins.queue.class_queue import QueueEntry


class PrefixIndex:
    """Looks up cached prefixes, and files each entry under its first block that is not cached.

    When that block is cached, the entries filed under it become `stale`. Becoming stale costs nothing
    per entry; stale entries are looked up when the order is next needed. So a prefill that fills
    1,000 blocks in ten steps costs each of its waiters one look-up, not 1,000.
    """

    def __init__(self, cached: Container[BlockHash]) -> None:
        self._cached = cached
        self._under: dict[BlockHash, dict[QueueEntry, None]] = {}
        self._prefix_ends: dict[BlockHash, int] = {}
        self.evictions = 0
        """The number of evictions. An entry whose last look-up is older may have lost blocks."""
        self._walked: dict[BlockHash, tuple[Sequence[BlockHash], int]] = {}
        self.stale: deque[QueueEntry] = deque()
        """Entries whose cost may have fallen since their last look-up."""

    def added(self, blocks: Iterable[BlockHash]) -> None:
        """Note blocks that can be read from the cache now. Call once for all blocks that an engine step stored."""
        self._walked = {}
        under = self._under
        for block in blocks:
            if block in under:
                waiters = under.pop(block)
                for entry in waiters:
                    entry.missing = None
                self.stale.extend(waiters)

    def removed(self) -> None:
        """Note that blocks were evicted. Entries that lost blocks are found when they come to the head."""
        self._walked = {}
        self.evictions += 1

    def ends_prefix(self, block: BlockHash) -> bool:
        """Whether the cached prefix of some entry ends with this block, as last evaluated. Only policies that follow the
        cache evaluate entries."""
        return block in self._prefix_ends

    def look_up(self, entry: QueueEntry) -> None:
        """Update `entry.cached`. File the entry if a block is missing."""
        hashes, usable = entry.request.block_hashes, entry.usable
        start = 0 if entry.evictions != self.evictions else entry.cached
        end = self._walk(hashes, start, usable)
        entry.cached = end
        entry.evictions = self.evictions
        self.forget(entry)
        if end:
            last = hashes[end - 1]
            entry.last_cached = last
            self._prefix_ends[last] = self._prefix_ends.get(last, 0) + 1
        if end < usable:
            missing = hashes[end]
            entry.missing = missing
            self._under.setdefault(missing, {})[entry] = None

    def forget(self, entry: QueueEntry) -> None:
        """Take an entry out of the index."""
        if entry.last_cached is not None:
            count = self._prefix_ends.pop(entry.last_cached) - 1
            if count:
                self._prefix_ends[entry.last_cached] = count
            entry.last_cached = None
        if entry.missing is not None:
            waiters = self._under[entry.missing]
            del waiters[entry]
            if not waiters:
                del self._under[entry.missing]
            entry.missing = None

    def count(self, request_hashes: Sequence[BlockHash], usable: int) -> int:
        """The number of leading blocks that are cached, out of the first `usable`."""
        return self._walk(request_hashes, 0, usable)

    def stale_all(self, entries: Iterable[QueueEntry]) -> None:
        """Mark all entries stale."""
        self.stale = deque(entries)

    def drain(self, most: int) -> Sequence[QueueEntry]:
        """Take up to `most` entries from `stale`. Entries that no longer wait are dropped."""
        stale = self.stale
        drained: list[QueueEntry] = []
        while stale and len(drained) < most:
            entry = stale.popleft()
            if entry.key_node:
                drained.append(entry)
        return drained

    def _walk(self, hashes: Sequence[BlockHash], start: int, usable: int) -> int:
        """Index of the first block at or after `start` that is not cached.

        Requests that share a prefix walk the same blocks. The first walk is remembered until the cache changes. Each
        later request needs one comparison, because equal hashes mean equal prefixes.
        """
        if start >= usable:
            return start
        walked = self._walked.get(hashes[start])
        end = _common(hashes, walked[0], start, min(walked[1], usable)) if walked else start
        cached = self._cached
        while end < usable and hashes[end] in cached:
            end += 1
        if walked is None or end > walked[1]:
            self._walked[hashes[start]] = (hashes, end)
        return end


def _common(a: Sequence[BlockHash], b: Sequence[BlockHash], low: int, high: int) -> int:
    """The largest end in `low..high` up to which `a` and `b` are equal. They must be equal up to `low`."""
    if low < high and a[high - 1] == b[high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class Costs(Protocol):
    """The source of the cost model: `OnlineFit`, or any object with a `model`."""

    @property
    def model(self) -> CostModel: ...


@dataclass(frozen=True)
class FixedCosts:
    """`Costs` that are known from the start."""

    model: CostModel


class CostEstimator:
    """Computes keys and costs from the policy, the prefix cache and the cost model.

    It changes only the index's notes in an entry.
    """

    def __init__(
        self, policy: QueuePolicy, prefix_index: PrefixIndex, costs: Costs, *, page_size: int
    ) -> None:
        self.policy = policy
        self._prefix_index = prefix_index
        self._costs = costs
        self.model = costs.model
        """The cost model in use, see `renew`. Read it, do not change it."""
        self._page_size = page_size

    def entry(self, request: Waiting) -> QueueEntry:
        """A new entry for a request, not yet evaluated."""
        entry = QueueEntry(request, self._page_size)
        entry.group = self.policy.group(request)
        return entry

    def evaluate(self, entry: QueueEntry) -> tuple[float, float]:
        """The present key, and the present cost in seconds."""
        request, calibrated = entry.request, self.policy.calibrated
        if calibrated:
            self._prefix_index.look_up(entry)
        elif not entry.key_node:
            entry.cached = self._prefix_index.count(request.block_hashes, entry.usable)
        ready = self._ready_tokens(request, entry.cached)
        cost_s = self.model.prefill_s(request.tokens, ready)
        first = entry.resumed and self.policy.resumes_first
        key = -inf if first else self.policy.key(request, ready, cost_s)
        return key, cost_s

    def cost_s(self, request: Waiting) -> float:
        """Predicted prefill time of a request with the present cache."""
        return self.model.prefill_s(request.tokens, self.known_tokens(request))

    def known_tokens(self, request: Waiting) -> int:
        """Tokens of a request that need no computing: they are cached, or another engine sends them."""
        usable = QueueEntry(request, self._page_size).usable
        return self._ready_tokens(request, self._prefix_index.count(request.block_hashes, usable))

    def left(self, request: Waiting, computed_tokens: int) -> float:
        """The key of the remaining part of a running prefill."""
        left_s = self.model.prefill_s(request.tokens, computed_tokens)
        return self.policy.key(request, computed_tokens, left_s)

    def renew(self) -> bool:
        """Switch to the newest model. Returns whether the model changed."""
        changed = self.model is not self._costs.model
        self.model = self._costs.model
        return changed

    def _ready_tokens(self, request: Waiting, cached_blocks: int) -> int:
        loaded = min(request.loaded, request.tokens - 1)
        return max(cached_blocks * self._page_size, loaded)
