# SPDX-License-Identifier: Apache-2.0
"""What engines have cached, as the live router learns it: by their events, or by what they computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import zmq.asyncio

from scheduler_plugins.router.engines import BackendEngine
from scheduler_plugins.router.index.follower import EventFollower
from scheduler_plugins.router.index.prefixes import Prefixes, PromptKeys
from scheduler_plugins.router.policies.base import BlockHash

_MOST_SOCKETS = 4096


class EngineCaches:
    """Fills one index for all engines. Followers run on the event loop."""

    def __init__(self, prefixes: Prefixes | None = None) -> None:
        self.prefixes = prefixes or Prefixes()
        self._context: zmq.asyncio.Context | None = None
        self._followers: dict[BackendEngine, EventFollower] = {}
        self._tasks: dict[BackendEngine, asyncio.Task[None]] = {}

    def follow(self, engine: BackendEngine, endpoint: str, replay: str | None) -> None:
        """Listen to the engine's KV events from now on. Does nothing if it is listened to there already.

        Args:
            endpoint: where they are published, as `tcp://10.0.0.1:5557`.
            replay: where missing ones are asked for; None: nowhere.
        """
        known = self._followers.get(engine)
        if known is not None and known.endpoints == (endpoint, replay):
            return
        self.unfollow(engine)
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        follower = EventFollower(engine.name, endpoint, replay, self.prefixes, self._context)
        engine.follower = self._followers[engine] = follower
        self._tasks[engine] = asyncio.create_task(follower.run(), name=f"events of {engine.url}")

    def unfollow(self, engine: BackendEngine) -> None:
        """Listen to the engine no more, and forget what it said."""
        engine.follower = None
        self._followers.pop(engine, None)
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()
            self.prefixes.untold(engine.name)

    def lost(self, engine: BackendEngine) -> None:
        """The engine ended, or may have: its cache is gone."""
        if (follower := self._followers.get(engine)) is not None:
            follower.engine_lost()
        self.prefixes.forget(engine.name)

    def removed(self, engine: BackendEngine) -> None:
        """The engine left for good."""
        self.unfollow(engine)
        self.prefixes.remove(engine.name)

    def prefilled(self, engine: BackendEngine, prompt: Sequence[BlockHash], now_s: float) -> None:
        """The engine has this prompt's KV."""
        if isinstance(prompt, PromptKeys):
            self.prefixes.prefilled(engine, prompt, now_s)

    def describe(self, engine: BackendEngine) -> dict[str, Any]:
        """What is known of the engine's cache, for `/health`."""
        if (follower := self._followers.get(engine)) is not None:
            return follower.describe()
        state = self.prefixes.state(engine.name)
        return {"source": state.source, "blocks": state.blocks}

    def lag_s(self, engine: BackendEngine) -> float | None:
        """Age of the engine's last batch of events when it was applied; None: none came."""
        follower = self._followers.get(engine)
        return None if follower is None else follower.lag_s

    async def close(self) -> None:
        """Listen to nobody any more."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
