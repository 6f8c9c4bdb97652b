# SPDX-License-Identifier: Apache-2.0
"""The agent of a rank, as its engine sees it: commands go in, outcomes come out.

The work is done by one thread, `pd-agent`, which runs a `Loop`.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from pd_connector.agent.commands import Command, CommandQueue, Computed, Revoke, Withdraw
from pd_connector.agent.handshake import Identity
from pd_connector.agent.loop import Loop
from pd_connector.agent.owed import Outcome, OwedOutcomes
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.thread_priority import prefer_own_threads, prefer_short_slices
from pd_connector.config import Config
from pd_connector.errors import Cause, ConfigError
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.incoming import Load
from pd_connector.protocol.outgoing import Offer
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Transport

logger = logging.getLogger("pd_connector.agent.agent")

_CLOSE_TIMEOUT_S = 5.0
_UNDER_WAY = ("landing_slots", "send_slots", "incoming_transfers", "outgoing_transfers")
"""Gauges that are above zero while transfers are under way."""


class Agent:
    """Starts its thread when made. All methods are for the engine's thread.

    Args:
        config: settings.
        engine_id: the engine's name, told to peers.
        model: fingerprint of the model, for peers of schema 2.
        facts: which model this is, for all others; compared by `kv.model.model_problem`.
        cache: the rank's pages; a peer never touches them, the agent's thread does.
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
        facts: ModelFacts | None = None,
    ) -> None:
        if cache.largest_page_bytes > config.slot_bytes:
            raise ConfigError(
                f"slot_mib {config.slot_mib}: one page of one layer has "
                f"{cache.largest_page_bytes} bytes and must fit in a slot (config key slot_mib)"
            )
        self.telemetry = Telemetry()
        self._cache = cache
        self._gate = PageGate()
        self._owed = OwedOutcomes()
        self._commands = CommandQueue()
        self._stopping = False
        self._failed = False
        try:
            self._loop = Loop(
                config,
                Identity(engine_id, secrets.randbits(63), model, facts),
                cache,
                self._commands,
                self._gate,
                self.telemetry,
                self._owed.report,
                produces=produces,
                consumes=consumes,
                shards=shards,
                wrap=wrap,
            )
        except BaseException:
            self._commands.close()
            raise
        self._thread = threading.Thread(target=self._run, name="pd-agent", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Control port that consumers dial; 0 for a rank that does not produce."""
        return self._loop.port

    def submit(self, command: Command) -> None:
        """Hand a command to the agent's thread.

        What the calling thread has queued on the device so far is done before pages of an `Offer`
        or `Computed` are read, or pages of a `Load` are written. After `Revoke` and `Withdraw`
        have returned, the request's pages are not read any more.
        """
        if isinstance(command, Revoke | Withdraw):
            self._gate.shut(command.request)
        fence = self._cache.fence() if isinstance(command, Offer | Computed | Load) else None
        self._owed.expect(command)
        self._commands.put(command, fence)

    def outcomes(self) -> list[Outcome]:
        """Ends of loads, leases and watched holds since the last call, each reported once.

        If the thread has died, everything it still owed ends here with cause `internal`.
        """
        outcomes = self._owed.take()
        if self._failed:
            outcomes += self._owed.fail_all(Cause.INTERNAL, "agent died")
        return outcomes

    def wait_for_outcome(self, timeout_s: float) -> bool:
        """Wait until there is an outcome, if transfers are under way; at most `timeout_s` seconds.

        Returns:
            Whether it returned early: there is an outcome, or no transfer is under way.
        """
        gauges = self.telemetry.gauges()
        under_way = any(gauges.get(name) for name in _UNDER_WAY)
        return not under_way or self._owed.wait(timeout_s)

    def close(self) -> None:
        """Stop the thread and free sockets, memory and descriptors. Harmless to repeat."""
        if self._stopping:
            return
        self._stopping = True
        self._commands.wake()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("agent thread does not stop: its sockets are left to the process' end")
            return
        self._commands.close()

    def _run(self) -> None:
        prefer_own_threads()
        prefer_short_slices()
        try:
            while not self._stopping:
                self._loop.wait()
                self._loop.step(time.monotonic())
        except Exception:
            # Nothing is expected to get here. `outcomes` ends what was owed.
            logger.exception("agent failed: transfers of this engine end, requests are recomputed")
            self.telemetry.count("agent_failures")
            self._failed = True
            self._owed.wake()
        finally:
            self._loop.close()
