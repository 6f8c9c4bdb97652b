# SPDX-License-Identifier: Apache-2.0
"""The engine's commands to the consuming half. They are carried out when the addresses of their producers are known."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pd_connector.agent.commands import Drop, Hold
from pd_connector.agent.confined import confined
from pd_connector.agent.consuming.auditor import Auditor
from pd_connector.agent.consuming.name_queue import Named, NameQueue
from pd_connector.agent.consuming.receive_pipeline import ReceivePipeline
from pd_connector.agent.page_gate import PageGate
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import Action, Finished, Held, Load
from pd_connector.telemetry import Telemetry

Command = Hold | Load | Drop


class ConsumerCommands:
    """Used by the agent's thread only.

    Args:
        names: holds commands during the look-up of their producers' names.
        gate: the engine's thread shuts it for requests that are dropped; it is opened here.
        act: carries out the state machine's actions.
    """

    def __init__(
        self,
        names: NameQueue,
        consumer: Consumer,
        receive_pipeline: ReceivePipeline,
        gate: PageGate,
        auditor: Auditor,
        telemetry: Telemetry,
        act: Callable[[Sequence[Action], float], None],
    ) -> None:
        self._names = names
        self._consumer = consumer
        self._receive_pipeline = receive_pipeline
        self._gate = gate
        self._auditor = auditor
        self._telemetry = telemetry
        self._act = act

    def execute(self, command: Command, fence: Any, now: float) -> None:
        """Carry out a command, at once or when the addresses of its producers are known.

        Args:
            fence: pages of a `Load` are filled after the device's work before this event. That work may still write the
                pages for their previous request.
        """
        self._run(self._names.put(command, fence, now), now)

    def tick(self, now: float) -> None:
        """Carry out the commands whose addresses are known now, and end those that have waited too long."""
        self._run(self._names.ready(now), now)

    def close(self) -> None:
        self._names.close()

    def _run(self, ready: Sequence[Named], now: float) -> None:
        for named in ready:
            what = f"the transfer of request {named.command.request}"
            with confined(self._telemetry, what, partial(self._give_up, named.command, now)):
                self._carry_out(*named, now)
            if isinstance(named.command, Drop):
                self._gate.open(named.command.request)  # `Agent.submit` has shut it

    def _carry_out(
        self, command: Command, fence: Any, cause: Cause | None, detail: str, now: float
    ) -> None:
        match command:
            case Load() | Hold() if cause is not None:
                self._fail(command, cause, detail, now)
            case Load():
                self._receive_pipeline.fill_after(command, fence)
                self._act(self._consumer.load(command, now), now)
            case Hold(request, transfer, peers, watch, engine_id, keep):
                hold = self._consumer.hold
                actions = hold(request, transfer, peers, watch, now, engine_id, keep=keep)
                self._act(actions, now)
            case Drop(request, why):
                self._auditor.dropped(request, now)
                self._act(self._consumer.drop(request, why, now), now)

    def _give_up(self, command: Command, now: float) -> None:
        """An error ends only the command's transfer."""
        ended = self._consumer.drop(command.request, Cause.INTERNAL, now)
        self._act(ended, now)
        if not any(isinstance(action, Finished | Held) for action in ended):
            self._fail(command, Cause.INTERNAL, "an unexpected error, see this log", now)

    def _fail(self, command: Command, cause: Cause, detail: str, now: float) -> None:
        match command:
            case Load():
                self._act([Finished(command.request, cause, detail)], now)
            case Hold() if (
                command.watch
            ):  # without a watch its `Load` fails later, and is counted then
                self._act([Held(command.request, cause, detail)], now)
