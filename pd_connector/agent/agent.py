# SPDX-License-Identifier: Apache-2.0
"""The one thread of a rank: turns messages, completions and deadlines into steps of the state
machines. It owns transports, slots and sessions; the engine's doors reach it through two queues.
"""

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from pd_connector.agent.commands import Command, Computed, Drop, Expect, Hold, Revoke, Withdraw
from pd_connector.agent.consumer_side import ConsumerSide
from pd_connector.agent.handshake import Identity
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.producer_side import ProducerSide
from pd_connector.agent.station import Station
from pd_connector.agent.thread_priority import prefer_own_threads, prefer_short_slices
from pd_connector.codec import COMPILER
from pd_connector.config import Config
from pd_connector.control.keys import CurveKeys, Gatekeeper
from pd_connector.errors import Cause, ConfigError
from pd_connector.kv.geometry import Shard
from pd_connector.memory.buffers import Buffers
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.incoming import Finished, Held, Load
from pd_connector.protocol.outgoing import Free, Offer
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Transport
from pd_connector.transport.registry import make_transports

logger = logging.getLogger("pd_connector.agent.agent")

_RESTLESS_POLL_MS = 1
_PREPARING_POLL_MS = 20
_CLOSE_TIMEOUT_S = 5.0
_UNDER_WAY = ("landing_slots", "send_slots", "incoming_transfers", "outgoing_transfers")
"""Gauges that say so."""

Outcome = Free | Finished | Held


class Agent:
    """Starts its thread when made. `submit`, `outcomes` and `close` may be called by others.

    Args:
        config: settings.
        engine_id: the engine's name, told to peers.
        model: fingerprint of the model.
        cache: the rank's pages; a peer never touches them, this thread does.
        produces: serve consumers.
        consumes: fetch from producers.
        shards: what the ranks of this engine hold, this one included; just this one by default.
        wrap: what to make of each transport, for tests.

    Raises:
        PDConnectorError: the host cannot be listened on, a transport cannot be set up, or a
            page does not fit in a slot.
    """

    def __init__(
        self,
        config: Config,
        engine_id: str,
        model: bytes,
        cache: PagedCache,
        *,
        produces: bool,
        consumes: bool,
        shards: Sequence[Shard] = (),
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
    ) -> None:
        if cache.largest_page_bytes > config.slot_bytes:
            raise ConfigError(
                f"slot_mib {config.slot_mib}: one page of one layer has "
                f"{cache.largest_page_bytes} bytes and must fit in a slot (config key slot_mib)"
            )
        self.identity = Identity(engine_id, secrets.randbits(63), model)
        self.telemetry = Telemetry()
        self._config = config
        self._cache = cache
        self._shards = tuple(shards)
        self._gate = PageGate()
        self._commands: queue.SimpleQueue[tuple[Command, Any]] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._news = threading.Event()  # there are outcomes
        self._loading: set[str] = set()
        self._leasing: set[str] = set()
        self._watching: set[str] = set()
        self._stopping = False
        self._failed = False
        self._poller = zmq.Poller()
        self._polled: list[Any] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper: Gatekeeper | None = None
        self._buffers = Buffers(config, cache.device, produces=produces, consumes=consumes)
        self._transports: list[Transport] = []
        self._server: ProducerSide | None = None
        self._fetcher: ConsumerSide | None = None
        try:
            self._set_up(produces, consumes, wrap)
        except BaseException:
            self._shut()
            os.close(self._wake)
            raise
        self._update_gauges()
        self._thread = threading.Thread(target=self._run, name="pd-agent", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Control port that consumers dial; 0 for a rank that does not produce."""
        return self._server.port if self._server else 0

    def submit(self, command: Command) -> None:
        """Hand a command to the thread. What the calling thread has queued on the device so far
        is done before pages of an `Offer` or `Computed` are read, or pages of a `Load` written.
        After `Revoke` and `Withdraw` have returned, the request's pages are not read any more."""
        fence = None
        match command:
            case Offer():
                if command.final:
                    self._leasing.add(command.request)
                fence = self._cache.fence()
            case Computed():
                fence = self._cache.fence()
            case Revoke() | Withdraw():
                self._gate.shut(command.request)
            case Hold() if command.watch:
                self._watching.add(command.request)
            case Load():
                self._loading.add(command.request)
                fence = self._cache.fence()
            case Drop():
                self._watching.discard(command.request)
        self._commands.put((command, fence))
        os.eventfd_write(self._wake, 1)

    def outcomes(self) -> list[Outcome]:
        """Ends of loads, leases and watched holds since the last call, each reported once.

        If the thread has died, everything it still owed ends here with cause `internal`.
        """
        ended: list[Outcome] = []
        self._news.clear()
        while not self._outcomes.empty():
            ended.append(self._outcomes.get())
        if self._failed:
            ended += [Finished(r, Cause.INTERNAL, "agent died") for r in self._loading]
            ended += [Free(request, Cause.INTERNAL) for request in self._leasing]
            ended += [Held(request, Cause.INTERNAL, "agent died") for request in self._watching]
        known: list[Outcome] = []
        for outcome in ended:
            owed = {Finished: self._loading, Free: self._leasing, Held: self._watching}[
                type(outcome)
            ]
            if outcome.request in owed:
                owed.discard(outcome.request)
                known.append(outcome)
        return known

    def rest(self, timeout_s: float) -> bool:
        """Wait until there is an outcome, if transfers are under way; not longer than this.

        Returns:
            Whether it was over before its time.
        """
        gauges = self.telemetry.gauges()
        under_way = any(gauges.get(name) for name in _UNDER_WAY)
        return not under_way or self._news.wait(timeout_s)

    def close(self) -> None:
        """Stop the thread and free sockets, memory and descriptors. Harmless to repeat."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("agent thread does not stop: its sockets are left to the process' end")
            return
        os.close(self._wake)

    def _set_up(
        self, produces: bool, consumes: bool, wrap: Callable[[Transport], Transport]
    ) -> None:
        config = self._config
        keys = CurveKeys.derive(config.key) if config.key else None
        self._gatekeeper = Gatekeeper(self._context, keys) if keys else None
        self._begin_to_compile()
        made = make_transports(self._context, config, keys, self._buffers)
        self._transports = [wrap(transport) for transport in made]
        station = Station(
            config,
            self.identity,
            self._context,
            keys,
            self._cache,
            self._transports,
            self.telemetry,
        )
        if produces:
            self._server = ProducerSide(station, self._buffers.sending, self._gate, self._tell)
        if consumes:
            self._fetcher = ConsumerSide(station, self._shards, self._tell)

    def _begin_to_compile(self) -> None:
        """Loops that chunks of a cache in host memory will want; nobody waits for them."""
        if self._cache.on_host and self._config.codec != "raw":
            COMPILER.begin()

    def _tell(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)
        self._news.set()

    def _run(self) -> None:
        prefer_own_threads()
        prefer_short_slices()
        try:
            while not self._stopping:
                self._wait()
                self._step(time.monotonic())
        except Exception:
            # Nothing below is expected to get here; what was owed is ended by `outcomes`.
            logger.exception("agent failed: transfers of this engine end, requests are recomputed")
            self.telemetry.count("agent_failures")
            self._failed = True
            self._news.set()
        finally:
            self._shut()

    def _wait(self) -> None:
        pollables = self._pollables()
        if pollables != self._polled:  # seldom
            self._poller, self._polled = zmq.Poller(), pollables
            for pollable in pollables:
                self._poller.register(pollable, zmq.POLLIN)
        halves = [half for half in (self._server, self._fetcher) if half]
        restless = any(t.restless for t in self._transports) and any(h.busy for h in halves)
        timeout_ms = _RESTLESS_POLL_MS if restless else int(self._config.heartbeat_s * 500)
        if any(half.preparing for half in halves):  # nobody tells when that has ended
            timeout_ms = min(timeout_ms, _PREPARING_POLL_MS)
        self._poller.poll(timeout_ms)

    def _step(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._gatekeeper:
            self._gatekeeper.answer()
        messages = self._server.take() if self._server else []
        # Between the two, so that an offer is known to whatever was sent after it.
        while not self._commands.empty():
            self._obey(*self._commands.get(), now)
        if self._server:
            self._server.handle(messages, now)
        if self._fetcher:
            self._fetcher.receive(now)
        for transport in self._transports:
            written, landed = transport.poll()
            for write in written:
                if self._server:
                    self._server.written(transport, write)
            for arrival in landed:
                if self._fetcher:
                    self._fetcher.landed(arrival, now)
        if self._server:
            self._server.send(now)
            self._server.tick(now)
        if self._fetcher:
            self._fetcher.tick(now)
        self._update_gauges()

    def _obey(self, command: Command, fence: Any, now: float) -> None:
        match command:
            case Expect(transfer) if self._server:
                self._server.expect(transfer, now)
            case Offer() if self._server:
                self._server.offer(command, fence, now)
            case Computed() if self._server:
                self._server.computed(*command, fence)
            case Revoke(transfer, request) if self._server:
                self._server.revoke(transfer, request)
            case Withdraw(transfer, request) if self._server:
                self._server.withdraw(transfer, request)
            case Hold(request, transfer, peers, watch) if self._fetcher:
                self._fetcher.hold(request, transfer, peers, watch, now)
            case Load() if self._fetcher:
                self._fetcher.load(command, fence, now)
            case Drop(request, cause) if self._fetcher:
                self._fetcher.drop(request, cause, now)

    def _pollables(self) -> list[Any]:
        found: list[Any] = [self._wake]
        for owner in (self._server, self._fetcher, *self._transports):
            if owner:
                found += owner.pollables
        if self._gatekeeper:
            found.append(self._gatekeeper.socket)
        return found

    def _update_gauges(self) -> None:
        for half in (self._server, self._fetcher):
            if half:
                self.telemetry.gauge(**half.gauges())

    def _shut(self) -> None:
        for owner in (self._server, self._fetcher, *self._transports, self._gatekeeper):
            if owner:
                owner.close()
        self._buffers.close()
        self._context.destroy(linger=100)
