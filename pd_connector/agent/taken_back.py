# SPDX-License-Identifier: Apache-2.0
"""When the gate of a request is shut: as soon as the engine says that it takes the pages back."""

from collections.abc import Callable

from pd_connector.agent.commands import Command, Drop, Revoke, Withdraw


class TakenBack:
    """The gate is shut once for every command that takes pages back, and the agent's thread opens it
    once for each: an engine may announce a command before it submits it. Used by the engine's thread.

    Args:
        shut: shuts the gate of a request.
    """

    def __init__(self, shut: Callable[[str], None]) -> None:
        self._shut = shut
        self._announced: list[Command] = []

    def announced(self, command: Command) -> None:
        """The engine is about to overwrite pages, and will submit this command."""
        if isinstance(command, Revoke | Withdraw | Drop):
            self._shut(command.request)
            self._announced.append(command)

    def submitted(self, command: Command) -> None:
        """The engine submits this command."""
        if command in self._announced:
            self._announced.remove(command)
        elif isinstance(command, Revoke | Withdraw | Drop):
            self._shut(command.request)
