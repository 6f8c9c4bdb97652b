# SPDX-License-Identifier: Apache-2.0
"""What the engine says is computed while its device still computes it.

An engine queues a step's work on its device and tells at once what will be computed then. If the agent read
those pages now, its thread would wait for the device. Everything else on that thread would wait, too: other
transfers, heartbeats, an engine that takes pages back.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator
from typing import Any

from pd_connector.agent.commands import Computed
from pd_connector.protocol.producing.outgoing import Offer

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
