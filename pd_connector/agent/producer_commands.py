# SPDX-License-Identifier: Apache-2.0
"""What the engine tells the producing half: prefills that begin, come further, and take pages back."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pd_connector.agent.commands import Computed, Expect, Revoke, Withdraw
from pd_connector.agent.confined import confined
from pd_connector.agent.outbox import Outbox
from pd_connector.agent.page_gate import PageGate
from pd_connector.errors import Cause
from pd_connector.protocol.outgoing import Action, Free, Offer
from pd_connector.protocol.producer import Producer
from pd_connector.telemetry import Telemetry

ProducerCommand = Expect | Offer | Computed | Revoke | Withdraw


class ProducerCommands:
    """Used by the agent's thread only.

    Args:
        gate: shut by the engine's thread for requests that take their pages back; opened here.
        act: carries out what follows.
    """

    def __init__(
        self,
        producer: Producer,
        outbox: Outbox,
        gate: PageGate,
        telemetry: Telemetry,
        act: Callable[[list[Action]], None],
    ) -> None:
        self._producer = producer
        self._outbox = outbox
        self._gate = gate
        self._telemetry = telemetry
        self._act = act

    def execute(self, command: ProducerCommand, fence: Any, now: float) -> None:
        """Carry out a command. An error ends the transfer that it is about, and nothing else.

        Args:
            fence: pages of an `Offer` or `Computed` are gathered after the work that it stands for,
                which computes them.
        """
        what = f"transfer {command.transfer}"
        with confined(self._telemetry, what, partial(self._give_up, command)):
            self._execute(command, fence, now)
        if isinstance(command, Revoke | Withdraw):
            self._gate.open(command.request)  # `Agent.submit` has shut it

    def _execute(self, command: ProducerCommand, fence: Any, now: float) -> None:
        match command:
            case Expect(transfer):
                self._producer.expect(transfer, now)
            case Offer():
                self._outbox.fence(command.request, fence)
                self._act(self._producer.offer(command, now))
            case Computed(transfer, request, tokens, stop_layer):
                self._outbox.fence(request, fence)
                self._act(self._producer.computed(transfer, request, tokens, stop_layer))
            case Revoke(transfer, request, doubtful_since):
                self._outbox.forget(request)
                self._act(self._producer.revoke(transfer, request, doubtful_since))
            case Withdraw(transfer, request):
                self._outbox.forget(request)
                self._act(self._producer.withdraw(transfer, request))

    def _give_up(self, command: ProducerCommand) -> None:
        self._act(self._producer.give_up(command.transfer, "an unexpected error, see its log"))
        if isinstance(command, Offer) and command.final:
            self._act([Free(command.request, Cause.INTERNAL)])  # only the first one counts
