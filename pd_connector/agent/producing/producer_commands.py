# SPDX-License-Identifier: Apache-2.0
"""The engine's commands to the producing half: prefills begin, compute more, and take pages back.

An engine queues a step's work on its device, and says at once what will be computed. If the agent read those pages now, its
thread would wait for the device, and so would other transfers, heartbeats, and an engine that takes pages back. So such
commands wait here (`Unfinished`) until the device has computed their pages.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from pd_connector.agent.commands import Computed, Expect, Revoke, Withdraw
from pd_connector.agent.confined import confined
from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.producing.send_pipeline import SendPipeline
from pd_connector.errors import Cause
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.producing.outgoing import Action, Free, Offer
from pd_connector.protocol.producing.producer import Producer
from pd_connector.telemetry import Telemetry

ProducerCommand = Expect | Offer | Computed | Revoke | Withdraw


_Waiting = tuple[Offer | Computed, Any]  # a command with its fence


class Unfinished:
    """Commands that wait for the device. Commands of one transfer keep their order; other transfers overtake them. Used by
    the agent's thread only.

    Args:
        due: whether a command can be carried out now.
    """

    def __init__(self, due: Callable[[Offer | Computed, Any], bool]) -> None:
        self._due = due
        self._waiting: dict[str, deque[_Waiting]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def due(self) -> bool:
        """Whether a command can be carried out now."""
        return any(self._due(*commands[0]) for commands in self._waiting.values())

    @property
    def transfers(self) -> Container[str]:
        """The transfers with a command that waits."""
        return self._waiting.keys()

    def keep(self, command: Offer | Computed, fence: Any) -> bool:
        """Keep the command if it has to wait. Returns whether it waits."""
        commands = self._waiting.get(command.transfer)
        if commands is None and self._due(command, fence):
            return False
        self._waiting.setdefault(command.transfer, deque()).append((command, fence))
        return True

    def drop(self, transfer: str, request: str) -> None:
        """Forget this request's commands."""
        commands = self._waiting.pop(transfer, ())
        if others := deque(each for each in commands if each[0].request != request):
            self._waiting[transfer] = others

    def take_due(self, at_once: Container[str]) -> Iterator[_Waiting]:
        """Yield the commands that need not wait any more, and all commands of the transfers `at_once`. The caller must
        carry out each command before it takes the next."""
        for transfer, commands in list(self._waiting.items()):
            while commands and (transfer in at_once or self._due(*commands[0])):
                yield commands.popleft()
            if not commands:
                del self._waiting[transfer]


class ProducerCommands:
    """Used by the agent's thread only.

    Args:
        gate: the engine's thread shuts it for requests whose pages it takes back; it is opened here.
        cache: its device is the engine's.
        act: carries out the state machine's actions.
    """

    def __init__(
        self,
        producer: Producer,
        send_pipeline: SendPipeline,
        gate: PageGate,
        cache: PagedCache,
        telemetry: Telemetry,
        act: Callable[[list[Action]], None],
    ) -> None:
        self._producer = producer
        self._send_pipeline = send_pipeline
        self._gate = gate
        self._cache = cache
        self._telemetry = telemetry
        self._act = act
        self._unfinished = Unfinished(self._due)

    @property
    def waits(self) -> bool:
        """Whether commands wait for the engine's device."""
        return bool(self._unfinished)

    @property
    def due(self) -> bool:
        """Whether `resume` can carry out a command now."""
        return self._unfinished.due

    def execute(self, command: ProducerCommand, fence: Any, now: float) -> None:
        """Carry out a command. An error ends only the command's transfer.

        Args:
            fence: an event on the device, behind the work that computes the pages of an `Offer` or `Computed`. The
                command waits until this event has happened.
        """
        with self._confined(command):
            if self._kept(command, fence, now):
                return
            self._execute(command, fence, now)
        if isinstance(command, Revoke | Withdraw):
            self._gate.open(command.request)  # `Agent.submit` has shut it

    def resume(self, now: float, at_once: Container[str] = ()) -> None:
        """Carry out the commands that need not wait any more, and all commands of the transfers `at_once`."""
        for command, fence in self._unfinished.take_due(at_once):
            with self._confined(command):
                self._execute(command, fence, now)

    def resume_all(self, now: float) -> None:
        """Carry out all waiting commands."""
        self.resume(now, self._unfinished.transfers)

    def _confined(self, command: ProducerCommand) -> AbstractContextManager[None]:
        what = f"transfer {command.transfer}"
        return confined(self._telemetry, what, partial(self._give_up, command))

    def _kept(self, command: ProducerCommand, fence: Any, now: float) -> bool:
        """Keep the command if it has to wait. Returns whether it waits."""
        match command:
            case Offer() | Computed():
                kept = self._unfinished.keep(command, fence)
                if kept and isinstance(command, Offer):
                    self._producer.expect(
                        command.transfer, now
                    )  # openings can come before the offer is carried out
                return kept
            case Revoke(transfer, request) | Withdraw(transfer, request):
                self._unfinished.drop(transfer, request)
                self.resume(now, (transfer,))  # commands of another request with this transfer
        return False

    def _due(self, command: Offer | Computed, fence: Any) -> bool:
        return self._reported_before(command) or self._cache.happened(fence)

    def _reported_before(self, command: Offer | Computed) -> bool:
        """Whether all computed tokens of an offer were reported before. If so, the offer need not wait for its own
        fence, which belongs to a later step."""
        is_offer = isinstance(command, Offer)
        return is_offer and command.tokens <= self._send_pipeline.computed(command.request)

    def _execute(self, command: ProducerCommand, fence: Any, now: float) -> None:
        match command:
            case Expect(transfer):
                self._producer.expect(transfer, now)
            case Offer(request=request, tokens=tokens):
                if not self._reported_before(command):
                    self._send_pipeline.gather_after(request, fence, tokens)
                self._act(self._producer.offer(command, now))
            case Computed(transfer, request, tokens, stop_layer):
                self._send_pipeline.gather_after(
                    request, fence, tokens if stop_layer is None else 0
                )
                self._act(self._producer.computed(transfer, request, tokens, stop_layer))
            case Revoke(transfer, request, doubtful_since):
                self._send_pipeline.forget(request)
                self._act(self._producer.revoke(transfer, request, doubtful_since))
            case Withdraw(transfer, request):
                self._send_pipeline.forget(request)
                self._act(self._producer.withdraw(transfer, request))

    def _give_up(self, command: ProducerCommand) -> None:
        self._act(self._producer.give_up(command.transfer, "an unexpected error, see its log"))
        if isinstance(command, Offer) and command.final:
            self._act([Free(command.request, Cause.INTERNAL)])  # only the first `Free` counts
