# SPDX-License-Identifier: Apache-2.0
"""What engines have cached. The live router learns it from their KV events, or from the prompts that they
computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import zmq.asyncio

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.index.follower import EventFollower
from scheduler_plugins.router.index.hashes import Hashes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import NO_HASHES, PromptKeys
from scheduler_plugins.router.policies.base import BlockHash

_MOST_SOCKETS = 4096


class FollowedRanks:
    """`engine.Follower` of an engine whose data-parallel ranks each publish their own events."""

    def __init__(self) -> None:
        self.by_rank: dict[int, EventFollower] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def block_tokens(self) -> int:
        """Tokens of one block of the engine; 0 before any rank has reported it."""
        return max((follower.block_tokens for follower in self.by_rank.values()), default=0)

    @property
    def lag_s(self) -> float | None:
        """Age of the batch that was applied last, of any rank; None: no batch came."""
        return max(
            (follower.lag_s for follower in self.by_rank.values() if follower.lag_s is not None),
            default=None,
        )

    @property
    def reached(self) -> bool:
        """Whether the publishers of all ranks are connected, as far as is known."""
        return all(follower.reached is not False for follower in self.by_rank.values())

    def describe(self) -> dict[str, Any]:
        """The state of the engine's cache, for `/health`; one entry a rank if there are several."""
        states = {rank: follower.describe() for rank, follower in sorted(self.by_rank.items())}
        if len(states) == 1:
            return next(iter(states.values()))
        blocks = sum(state["blocks"] for state in states.values())
        return {
            "source": "events",
            "blocks": blocks,
            "ranks": {str(n): state for n, state in states.items()},
        }


class EngineCaches:
    """Fills one index for all engines. Followers run on the event loop."""

    def __init__(self) -> None:
        self.prefixes = Prefixes()
        self._context: zmq.asyncio.Context | None = None
        self._followed: dict[str, FollowedRanks] = {}  # by the engine's name, as in the index

    def follow(
        self,
        engine: BackendEngine,
        endpoint: str,
        replay: str | None,
        ranks: Sequence[int] = (0,),
        first: int = 0,
    ) -> None:
        """Follow the engine's KV events from now on. Ranks that are followed at the same endpoints already stay as
        they are.

        Args:
            endpoint: address of the events, as `tcp://10.0.0.1:5557`.
            replay: address that replays missing events; None: there is none.
            ranks: the engine's data-parallel ranks.
            first: the rank that these addresses belong to. Each further rank uses the next port, as in vLLM's
                `ZmqEventPublisher.offset_endpoint_port`.
        """
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        followed = self._followed.setdefault(engine.name, FollowedRanks())
        engine.follower = followed
        endpoints = dict[int, tuple[str, str | None]]()
        for rank in ranks:
            events = _moved(endpoint, rank - first)
            if events is not None:
                endpoints[rank] = (events, _moved(replay, rank - first))
        for rank, present in list(followed.by_rank.items()):
            if endpoints.get(rank) == present.endpoints:
                del endpoints[rank]
            else:
                self._unfollow(engine, rank)
        for rank, (events, replays) in endpoints.items():
            follower = EventFollower(
                engine.name, events, replays, self.prefixes, self._context, rank
            )
            followed.by_rank[rank] = follower
            name = f"events of {engine.url}, rank {rank}"
            followed.tasks[rank] = asyncio.create_task(follower.run(), name=name)

    def unfollow(self, engine: BackendEngine) -> None:
        """Stop following the engine, and forget its events."""
        engine.follower = None
        if (followed := self._followed.get(engine.name)) is not None:
            for rank in list(followed.by_rank):
                self._unfollow(engine, rank)
            del self._followed[engine.name]

    def _unfollow(self, engine: BackendEngine, rank: int) -> None:
        followed = self._followed[engine.name]
        followed.tasks.pop(rank).cancel()
        del followed.by_rank[rank]
        self.prefixes.rank_events_ended(engine.name, rank)

    def lost(self, engine: BackendEngine) -> None:
        """The engine ended, or may have ended: forget its cache."""
        if (followed := self._followed.get(engine.name)) is not None:
            for follower in followed.by_rank.values():
                follower.engine_lost()
        self.prefixes.forget(engine.name)

    def removed(self, engine: BackendEngine) -> None:
        """The engine left for good."""
        self.unfollow(engine)
        self.prefixes.remove(engine.name)

    def prefilled(self, engine: BackendEngine, prompt: Sequence[BlockHash], now_s: float) -> Hashes:
        """The engine has this prompt's KV. Returns what other routers must know of it, as `Prefixes.prefilled` does."""
        if isinstance(prompt, PromptKeys):
            return self.prefixes.prefilled(engine, prompt, now_s)
        return NO_HASHES

    def describe(self, engine: BackendEngine) -> dict[str, Any]:
        """The state of the engine's cache, for `/health`."""
        if (followed := self._followed.get(engine.name)) is not None:
            description = followed.describe()
        else:
            state = self.prefixes.state(engine.name)
            description = {"source": state.source, "blocks": state.blocks}
        if engine.store is not None:
            chunks = self.prefixes.store_chunks(engine.store.store)
            description |= {"pool": engine.store.name, "pool_chunks": chunks}
            if far := engine.store.in_far:
                chunks = self.prefixes.store_chunks(far.store)
                description |= {"far": far.name, "far_chunks": chunks}
        return description

    def lag_s(self, engine: BackendEngine) -> float | None:
        """Age of the engine's last batch of events when it was applied; None: no batch came."""
        followed = self._followed.get(engine.name)
        return None if followed is None else followed.lag_s

    def reached(self, engine: BackendEngine) -> bool | None:
        """Whether the publisher of the engine's events is connected; None: its events are not followed."""
        followed = self._followed.get(engine.name)
        return None if followed is None else followed.reached

    async def close(self) -> None:
        """Stop following all engines."""
        tasks = [task for ranks in self._followed.values() for task in ranks.tasks.values()]
        self._followed.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)


def _moved(address: str | None, ports: int) -> str | None:
    """The address with its port raised by `ports`; None if the address is None or has no port (only TCP has
    ports)."""
    if address is None or not ports:
        return address
    host, _, port = address.rpartition(":")
    tcp = address.startswith("tcp://") and port.isdigit()
    return f"{host}:{int(port) + ports}" if tcp else None
