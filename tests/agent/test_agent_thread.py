# SPDX-License-Identifier: Apache-2.0
"""The agent's thread: what it does when no loop can be made."""

import time
from typing import Any, cast

from support.waits import until

from pd_connector.agent.agent_thread import AgentThread
from pd_connector.agent.commands import CommandQueue
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.pending_outcomes import PendingOutcomes
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.pool.jobs import Save, Saved
from pd_connector.telemetry import Telemetry


class FailingLoop:
    """Its first turn fails."""

    port = 7000

    def wait(self) -> None:
        raise RuntimeError("a defect")

    def close(self) -> None: ...


def test_attempts_to_start_again_come_at_once_and_then_less_and_less_often() -> None:
    ports: list[int] = []
    at: list[float] = []

    def make_loop(port: int) -> Any:
        ports.append(port)
        at.append(time.monotonic())
        if len(ports) > 1:
            raise RuntimeError("no port is free")
        return FailingLoop()

    parts = CommandQueue(), PageGate(), PendingOutcomes()
    thread = AgentThread(Config(), Telemetry(), *parts, cast("Any", make_loop), lambda: None)
    thread.start()
    try:
        until(lambda: len(ports) > 4, "four attempts after 0.1, 0.2, 0.4 and 0.8 s")
    finally:
        thread.close()
    assert ports == [0, *[FailingLoop.port] * (len(ports) - 1)], "on the port that peers know"
    assert at[4] - at[1] >= 0.2 + 0.4 + 0.8 - 0.01


def test_what_an_abandoned_agent_reports_does_not_count_for_a_later_command() -> None:
    """It hung between its last look at the gate and its report. Meanwhile the engine has failed the command and submitted another
    one for a request of the same name."""
    outcomes = PendingOutcomes()
    save = cast("Any", Save)("r", b"", None, (), "")
    outcomes.expect(save)
    outcomes.abandon(Cause.AGENT_HUNG, "it hangs")
    assert outcomes.drain() == [Saved("r")], "failed"
    outcomes.expect(save)
    outcomes.report(Saved("r"))
    assert outcomes.drain() == []
    outcomes.fail_all(Cause.INTERNAL, "it begins again")
    assert outcomes.drain() == [Saved("r")]
    outcomes.expect(save)
    outcomes.report(Saved("r"))
    assert outcomes.drain() == [Saved("r")], "of the agent that began again"
