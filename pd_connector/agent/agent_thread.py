# SPDX-License-Identifier: Apache-2.0
"""The thread `pd-agent`: it runs a loop, and makes another if the loop fails or hangs."""

import logging
import threading
import time
from collections.abc import Callable

from pd_connector.agent.commands import CommandQueue
from pd_connector.agent.loop import Loop
from pd_connector.agent.metrics import UNDER_WAY
from pd_connector.agent.page_gate import AbandonedError, PageGate
from pd_connector.agent.pending_outcomes import PendingOutcomes
from pd_connector.agent.thread_priority import (
    prefer_own_threads,
    prefer_short_slices,
    prefer_short_turns,
)
from pd_connector.config import Config
from pd_connector.errors import Cause, PDConnectorError
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.agent.agent_thread")

_CLOSE_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
"""Pauses before a failed agent starts again: they double with each failed attempt."""


GRACE_S = 1.0


class TurnWatch:
    """When the agent's thread began its last turn, and whether it hangs. Written by the agent's thread, read by the
    engine's.

    The clock jumps when a machine was stopped, or moved to another host. A turn then looks overdue although it had no time
    to end. So an overdue turn gets GRACE_S more seconds, from the moment at which the engine's thread notices it.

    Args:
        timeout_s: longest duration of a turn.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        # The begin of an overdue turn, and when it was noticed.
        self._overdue = self._noticed = float("-inf")

    def begin(self, in_s: float = 0.0) -> float:
        """A turn begins in `in_s` seconds. Returns the present time in seconds, monotonic."""
        now = time.monotonic()
        self._began = now + in_s
        return now

    def left_s(self) -> float:
        """Seconds until the agent counts as hung; below 0 it is hung."""
        now, began = time.monotonic(), self._began
        left_s = began + self._timeout_s - now
        if left_s >= 0:
            return left_s
        if self._overdue != began:
            self._overdue, self._noticed = began, now
        return self._noticed + GRACE_S - now


class AgentThread:
    """Public methods are for the engine's thread. It makes the first loop; this thread makes later ones.

    Args:
        make_loop: makes a loop with a new epoch on this control port; 0: any port.
        enter: the thread calls it first.

    Attributes:
        loop: the loop that runs, or ran last.
        submitting: a lock. It is held while a command is submitted, so each command goes to exactly one loop.
    """

    def __init__(
        self,
        config: Config,
        telemetry: Telemetry,
        commands: CommandQueue,
        gate: PageGate,
        pending_outcomes: PendingOutcomes,
        make_loop: Callable[[int], Loop],
        enter: Callable[[], None],
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._commands = commands
        self._gate = gate
        self._pending_outcomes = pending_outcomes
        self._make_loop = make_loop
        self._enter = enter
        self._closing = threading.Event()
        self._turn = TurnWatch(config.agent_timeout_s)
        self._abandoned = False  # the engine has given up the hung agent
        self.submitting = threading.Lock()
        self._rest_changed = threading.Condition()
        self._rests = False  # `rest` was called, and `wake` was not
        self._rested = False  # the loop has ended
        self.loop = make_loop(0)
        self._port = self.loop.port
        self._thread = threading.Thread(target=self._run, name="pd-agent", daemon=True)

    def start(self) -> None:
        self._turn.begin()
        self._thread.start()

    def left_s(self) -> float:
        """Seconds until the agent counts as hung; below 0 it is hung."""
        return self._turn.left_s()

    def rest(self) -> None:
        """End the loop until `wake`. After the return no page is touched, no transport has one registered, and all pending
        outcomes have failed. Later commands are for the next loop. It can be repeated.

        Raises:
            PDConnectorError: the thread did not answer. Its loop goes on.
        """
        timeout_s = self._config.agent_timeout_s
        with self._rest_changed:
            self._rests = True
            self._commands.wake()
            if not self._rest_changed.wait_for(lambda: self._rested, timeout_s):
                self._rests = False
                raise PDConnectorError(
                    f"the connector's thread has not answered for {timeout_s:g} s (agent_timeout_s) and may still use "
                    "the pages: try again, or end the process"
                )

    def wake(self) -> None:
        """Start a loop again, with a new epoch, on the same port. It can be repeated."""
        with self._rest_changed:
            self._rests = False
            self._turn.begin()
            self._rest_changed.notify_all()

    def abandon_if_hung(self) -> None:
        """Give the agent up if it hangs. Outcomes that became pending since the last call fail, too."""
        if self._rested or not self._hangs:
            return
        with self.submitting:  # not while the agent's thread begins again
            if self._hangs:
                self._abandon()

    @property
    def _hangs(self) -> bool:
        return self._abandoned or self._turn.left_s() < 0

    def abandon(self) -> None:
        """Give the hung agent up: from now on it touches no page, and its pending outcomes have failed."""
        with self.submitting:
            self._abandon()

    def _abandon(self) -> None:
        if not self._abandoned:
            self._abandoned = True
            logger.error(
                "agent has not answered for %g s (agent_timeout_s): transfers of this engine end, "
                "requests are recomputed",
                self._config.agent_timeout_s,
            )
            self._telemetry.count("agent_failures")
            self._telemetry.gauge(**dict.fromkeys((*UNDER_WAY, "leased_pages"), 0.0))
        touched = self._gate.abandon()
        self._pending_outcomes.abandon(Cause.AGENT_HUNG, "the agent hangs", but=touched)

    def close(self) -> None:
        """Stop the thread; its loop frees sockets, memory and descriptors. It can be repeated."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._commands.wake()
        with self._rest_changed:
            self._rest_changed.notify_all()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("agent thread does not stop: its sockets are closed when the process ends")
            return
        self._commands.close()

    def _run(self) -> None:
        prefer_own_threads()
        prefer_short_slices()
        prefer_short_turns(self._config.switch_interval_ms)
        self._enter()
        while not self._run_loop():
            if not self._rests or not self._wakes():
                self._restart()

    def _run_loop(self) -> bool:
        """Run the loop until `close`, `rest` or a failure. Returns whether `close` was called."""
        try:
            while not self._closing.is_set():
                if self._rests:
                    return False
                self._turn.begin()
                self.loop.wait()
                if self._abandoned:
                    raise AbandonedError("the agent hung and has been given up by its engine")
                self.loop.step(self._turn.begin())
        except AbandonedError as error:
            logger.error("agent starts again: %s", str(error))  # its frames would keep memory
            return False
        except Exception:
            # No error should get here: each ends at its session or request.
            logger.exception("agent failed: transfers of this engine end, requests are recomputed")
            self._telemetry.count("agent_failures")
            return False
        finally:
            self._close_loop()
        return True

    def _wakes(self) -> bool:
        """Rest until `wake` or `close`. Returns False if a new loop was needed and could not be made."""
        self._begin_again(cause=Cause.ASLEEP, detail="the engine sleeps: its pages are gone")
        self._telemetry.gauge(**dict.fromkeys((*UNDER_WAY, "leased_pages"), 0.0))
        with self._rest_changed:
            self._rested = True
            self._rest_changed.notify_all()
            self._rest_changed.wait_for(lambda: not self._rests or self._closing.is_set())
            self._rested = False
        return self._closing.is_set() or self._makes_loop()

    def _restart(self) -> None:
        """Fail all pending outcomes, and make a new loop with a new epoch on the same port."""
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            self._begin_again(pause_s)
            self._closing.wait(pause_s)
            if self._makes_loop():
                self._telemetry.count("agent_restarts")
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _makes_loop(self) -> bool:
        """Make a loop; returns whether that was possible."""
        try:
            self.loop = self._make_loop(self._port)
        except Exception:
            logger.exception("agent cannot start again; it goes on trying")
            return False
        self._turn.begin()
        if self._abandoned:  # this took longer than the engine waits for a turn
            self._begin_again()
        return True

    def _begin_again(
        self, in_s: float = 0.0, cause: Cause = Cause.INTERNAL, detail: str = "agent died"
    ) -> None:
        """Fail all pending outcomes. Later commands are for the next loop, which starts in `in_s` seconds."""
        with self.submitting:
            self._commands.clear()
            self._pending_outcomes.fail_all(cause, detail)
            self._gate.reset()
            self._abandoned = False
            self._turn.begin(in_s)

    def _close_loop(self) -> None:
        try:
            self.loop.close()
        except Exception:
            logger.exception("agent: not everything could be closed")
