# SPDX-License-Identifier: Apache-2.0
"""Receives one engine's KV events over ZeroMQ, and asks for missing events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from pd_connector.control.liveness import keep_alive
from scheduler_plugins.router.index.events import END_SEQUENCE, Batch, EventError, decode
from scheduler_plugins.router.index.prefixes import Prefixes, part_name


class Step(Enum):
    """What to do with a batch."""

    APPLY = "apply"
    SKIP = "skip"
    """The batch was applied before."""
    REPLAY = "replay"
    """Earlier batches are missing: ask for them from `next_number` on."""
    RESTART = "restart"
    """The engine has restarted: forget its blocks, then call `step` again."""


KEPT = 1_000
"""Number of batches whose times are remembered. A batch comes twice only if it came while a replay ran."""


class BatchNumbers:
    """The numbers of one engine's batches, by which missing events are detected. No I/O.

    An engine numbers its batches from 0, and starts again at 0 when it restarts. It sends no snapshot of its cache.
    Events that the router missed can only be replayed, as far back as the engine keeps them.
    """

    def __init__(self) -> None:
        self.next_number = 0
        """Number of the batch that is expected next."""
        self._last_ts = float("-inf")
        self._times: dict[int, float] = {}  # batch number -> time, of recent batches

    def step(self, number: int, ts: float) -> Step:
        """What to do with a batch that was published, not replayed. Changes nothing.

        Args:
            ts: time of the batch, by the engine's clock. An old number with another time means a restarted engine,
                even if its clock was set back.
        """
        if number < self.next_number:
            applied_ts = self._times.get(number)
            new = ts > self._last_ts if applied_ts is None else ts != applied_ts
            return Step.RESTART if new else Step.SKIP
        return Step.APPLY if number == self.next_number else Step.REPLAY

    def applied(self, number: int, ts: float) -> None:
        """A batch was applied."""
        self.next_number = number + 1
        self._last_ts = ts
        self._times[number] = ts
        if len(self._times) > KEPT:
            del self._times[next(iter(self._times))]

    def restart(self) -> None:
        """The engine has restarted: it counts from 0."""
        self.next_number = 0
        self._last_ts = float("-inf")
        self._times.clear()


logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0
"""Longest pause between two frames of a replay."""
_MOST_BYTES = 64 << 20
_RETRY_S = 1.0
_NUMBER_BYTES = 8
_SILENT_S = 10.0
"""The log says it if a publisher cannot be reached for this time, in seconds."""
_SLOWEST_MS = 2000
"""Longest pause between two attempts to reach a publisher."""
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_ALL_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | _GONE


class EventFollower:
    """Keeps one engine's part of the index up to date while `run` runs.

    Missing batches are requested from the replay endpoint. If there is no such endpoint, or it no longer has them, the
    engine's part of the index is dropped: with unknown gaps it would become more and more wrong.
    """

    def __init__(
        self,
        engine: str,
        endpoint: str,
        replay: str | None,
        prefixes: Prefixes,
        context: zmq.asyncio.Context,
        rank: int = 0,
    ) -> None:
        """Connect nothing yet.

        Args:
            endpoint: address of the engine's publisher, as `tcp://10.0.0.1:5557`.
            replay: address that replays events; None: there is none.
            rank: the data-parallel rank of the engine that publishes there.
        """
        self.engine = engine
        self.rank = rank
        self.first: int | None = None
        """Number of the first batch since which none is missing; None: no batch came yet."""
        self.lag_s: float | None = None
        """Age of the last batch when it was applied, by the clocks of the two machines; None: no batch came yet."""
        self.dropped = 0
        """How often the engine's part of the index was dropped because events were lost."""
        self.reached: bool | None = None
        """Whether the engine's publisher is connected; None: that is not known yet."""
        self._endpoint = endpoint
        self._replay_endpoint = replay
        self._prefixes = prefixes
        self._context = context
        self._numbers = BatchNumbers()

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """Addresses of the events and of their replay."""
        return self._endpoint, self._replay_endpoint

    @property
    def block_tokens(self) -> int:
        """Tokens of one block of the engine; 0 before the engine has reported it."""
        return self._prefixes.block_tokens(self.engine)

    @property
    def _name(self) -> str:
        return part_name(self.engine, self.rank)

    async def run(self) -> None:
        """Follow until cancelled. Wrong messages of the engine do not end it."""
        while True:
            try:
                await self._follow()
            except (zmq.ZMQError, OSError) as error:
                logger.warning("%s: no KV events from %s: %s", self._name, self._endpoint, error)
            except Exception:
                # No message may end this loop; otherwise the engine's part of the index would never change again.
                logger.exception("%s: its KV events cannot be used", self._name)
                self.engine_lost()
            await asyncio.sleep(_RETRY_S)

    def engine_lost(self) -> None:
        """The engine ended, or may have ended: its cache is gone, and its batches count from 0 again."""
        self._prefixes.forget_rank(self.engine, self.rank)
        self._numbers.restart()
        self.first = None

    def describe(self) -> dict[str, Any]:
        """The state of the engine's cache, for `/health`."""
        state = self._prefixes.state_of_rank(self.engine, self.rank)
        state_now: dict[str, Any] = {"source": "events", "blocks": state.blocks}
        if self.reached is False:
            state_now["note"] = (
                f"{self._endpoint} cannot be reached: nothing is learnt of this cache"
            )
            state_now["unreachable"] = self._endpoint
        elif self.first is None:
            state_now["note"] = f"no event has come from {self._endpoint} yet"
        elif self.first:
            state_now["note"] = (
                f"engines send no snapshot: blocks cached before batch {self.first} are not known"
            )
        if state.unknown:
            state_now["unknown_blocks"] = state.unknown
        if self.dropped:
            state_now["dropped"] = self.dropped
        return state_now

    async def _follow(self) -> None:
        with self._context.socket(zmq.SUB) as events:
            events.setsockopt(zmq.LINGER, 0)
            events.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
            events.setsockopt(zmq.RCVHWM, 100_000)
            events.setsockopt(zmq.SUBSCRIBE, b"")
            events.setsockopt(zmq.RECONNECT_IVL_MAX, _SLOWEST_MS)
            keep_alive(events)
            watching = asyncio.create_task(self._watch(events.get_monitor_socket(_ALL_EVENTS)))
            try:
                events.connect(self._endpoint)
                await self._replay()
                while True:
                    await self._received(await events.recv_multipart())
                    await asyncio.sleep(
                        0
                    )  # `recv_multipart` does not wait while there are messages
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
                events.disable_monitor()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Note whether the publisher is connected; log it if it has not been connected for a while."""
        self.reached, logged = None, False
        last = asyncio.get_running_loop().time()
        while True:
            left_s = last + _SILENT_S - asyncio.get_running_loop().time()
            waits_s = None if self.reached or logged else max(0.0, left_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(waits_s):
                    event = parse_monitor_message(await monitor.recv_multipart())["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    if logged:
                        logger.info("%s: its KV events are followed again", self._name)
                    self.reached, logged = True, False
                elif self.reached is not False:
                    self.reached, last = False, asyncio.get_running_loop().time()
                continue
            self.reached, logged = False, True
            logger.warning(
                "%s: its KV events at %s cannot be reached for %.0f s, so nothing is learnt of its cache, and prompts that it "
                "has cached may go elsewhere. Is the port open, and does the engine publish there (vLLM: "
                "--kv-events-config)? Another address is named with --kv-events",
                *(self._name, self._endpoint, _SILENT_S),
            )

    async def _received(self, frames: Sequence[bytes]) -> None:
        if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
            logger.debug(
                "%s sent a message of %d frames that is not a batch of KV events",
                self._name,
                len(frames),
            )
            return
        number = int.from_bytes(frames[-2], "big")
        try:
            batch = decode(frames[-1])
        except EventError as error:
            logger.warning("%s: batch %d: %s", self._name, number, error)
            self._lost()
            return
        step = self._numbers.step(number, batch.ts)
        if step is Step.RESTART:
            logger.info("%s has restarted: its events count from 0 again", self._name)
            self.engine_lost()
            step = self._numbers.step(number, batch.ts)
        if step is Step.REPLAY:
            await self._replay()
            step = self._numbers.step(number, batch.ts)
        if step is not Step.SKIP:
            self._apply(number, batch)

    async def _replay(self) -> None:
        """Ask for all missing batches, and apply them."""
        if self._replay_endpoint is None:
            return
        with self._context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
            asking.connect(self._replay_endpoint)
            start = self._numbers.next_number.to_bytes(_NUMBER_BYTES, "big")
            with suppress(TimeoutError, EventError):
                async with asyncio.timeout(REPLAY_TIMEOUT_S) as limit:
                    await asking.send_multipart((b"", start))
                    while len(frames := await asking.recv_multipart()) > 1:
                        if frames[-2] == END_SEQUENCE:
                            break
                        limit.reschedule(asyncio.get_running_loop().time() + REPLAY_TIMEOUT_S)
                        number, batch = int.from_bytes(frames[-2], "big"), decode(frames[-1])
                        if self._numbers.step(number, batch.ts) in (Step.APPLY, Step.REPLAY):
                            self._apply(number, batch)
                        await asyncio.sleep(0)  # as in `_follow`

    def _apply(self, number: int, batch: Batch) -> None:
        """Apply a batch. If earlier batches are missing, they are lost for good."""
        if number > self._numbers.next_number:
            if self.first is not None:
                self._lost()
            self.first = number
        elif self.first is None:
            self.first = number
        self._prefixes.apply_events(self.engine, batch, self.rank)
        self.lag_s = max(0.0, time.time() - batch.ts)
        self._numbers.applied(number, batch.ts)

    def _lost(self) -> None:
        """Events are missing for good."""
        self.dropped += 1
        self.first = None
        self._prefixes.forget_rank(self.engine, self.rank)
