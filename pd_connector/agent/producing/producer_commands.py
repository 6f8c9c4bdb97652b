# SPDX-License-Identifier: Apache-2.0
"""What the engine tells the producing half: prefills that begin, come further, and take pages back."""

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


_Told = tuple[Offer | Computed, Any]  # with its fence


class Unfinished:
    """Commands that wait for the device. Commands of one transfer keep their order; other transfers go ahead.
    Used by the agent's thread only.

    Args:
        due: whether a command need not wait, or no longer.
    """

    def __init__(self, due: Callable[[Offer | Computed, Any], bool]) -> None:
        self._due = due
        self._waiting: dict[str, deque[_Told]] = {}

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
        """Keep this command if it has to wait; returns whether that is so."""
        commands = self._waiting.get(command.transfer)
        if commands is None and self._due(command, fence):
            return False
        self._waiting.setdefault(command.transfer, deque()).append((command, fence))
        return True

    def drop(self, transfer: str, request: str) -> None:
        """Forget what this request has said."""
        commands = self._waiting.pop(transfer, ())
        if left := deque(told for told in commands if told[0].request != request):
            self._waiting[transfer] = left

    def take_due(self, at_once: Container[str]) -> Iterator[_Told]:
        """What need not wait any more, and everything of the transfers `at_once`. Each is carried out
        before the next is taken."""
        for transfer, commands in list(self._waiting.items()):
            while commands and (transfer in at_once or self._due(*commands[0])):
                yield commands.popleft()
            if not commands:
                del self._waiting[transfer]


class ProducerCommands:
    """Used by the agent's thread only.

    Args:
        gate: shut by the engine's thread for requests that take their pages back; opened here.
        cache: on whose device an engine computes.
        act: carries out what follows.
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
        """Whether `resume` has something to do."""
        return self._unfinished.due

    def execute(self, command: ProducerCommand, fence: Any, now: float) -> None:
        """Carry out a command. An error ends the transfer that it is about, and nothing else.

        Args:
            fence: pages of an `Offer` or `Computed` are gathered after the work that it stands for,
                which computes them. Until that is done the command waits.
        """
        with self._confined(command):
            if self._kept(command, fence, now):
                return
            self._execute(command, fence, now)
        if isinstance(command, Revoke | Withdraw):
            self._gate.open(command.request)  # `Agent.submit` has shut it

    def resume(self, now: float, at_once: Container[str] = ()) -> None:
        """Carry out what need not wait any more, and everything of the transfers `at_once`."""
        for command, fence in self._unfinished.take_due(at_once):
            with self._confined(command):
                self._execute(command, fence, now)

    def resume_all(self, now: float) -> None:
        """Carry out everything that waits."""
        self.resume(now, self._unfinished.transfers)

    def _confined(self, command: ProducerCommand) -> AbstractContextManager[None]:
        what = f"transfer {command.transfer}"
        return confined(self._telemetry, what, partial(self._give_up, command))

    def _kept(self, command: ProducerCommand, fence: Any, now: float) -> bool:
        """Whether the command has to wait; if so, it is kept."""
        match command:
            case Offer() | Computed():
                kept = self._unfinished.keep(command, fence)
                if kept and isinstance(command, Offer):
                    self._producer.expect(command.transfer, now)  # openings may come before it
                return kept
            case Revoke(transfer, request) | Withdraw(transfer, request):
                self._unfinished.drop(transfer, request)
                self.resume(now, (transfer,))  # another request's: the transfer is its own then
        return False

    def _due(self, command: Offer | Computed, fence: Any) -> bool:
        return self._told_before(command) or self._cache.happened(fence)

    def _told_before(self, command: Offer | Computed) -> bool:
        """Whether the command tells of no more computed tokens than were told before. If so, its own fence
        belongs to a later step, which may have only just begun."""
        is_offer = isinstance(command, Offer)
        return is_offer and command.tokens <= self._send_pipeline.computed(command.request)

    def _execute(self, command: ProducerCommand, fence: Any, now: float) -> None:
        match command:
            case Expect(transfer):
                self._producer.expect(transfer, now)
            case Offer(request=request, tokens=tokens):
                if not self._told_before(command):
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
            self._act([Free(command.request, Cause.INTERNAL)])  # only the first one counts
