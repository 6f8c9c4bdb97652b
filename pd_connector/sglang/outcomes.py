# SPDX-License-Identifier: Apache-2.0
"""The agent's reports about requests, kept until SGLang's queues ask."""

from typing import TypeVar

from pd_connector.agent.agent import Agent
from pd_connector.agent.owed import Outcome
from pd_connector.protocol.consuming.incoming import Finished, Held
from pd_connector.protocol.producing.outgoing import Free

Kind = TypeVar("Kind", Free, Finished, Held)


class Outcomes:
    """Outcomes of one rank's requests. Used by the engine's thread.

    Attributes:
        watched: requests whose outcomes are kept.
    """

    def __init__(self, agent: Agent) -> None:
        self.watched: set[str] = set()
        self._agent = agent
        self._told: dict[tuple[type[Outcome], str], Outcome] = {}

    def watch(self, request: str) -> None:
        """Keep the agent's reports about this request, until `forget`."""
        self.watched.add(request)

    def take(self, kind: type[Kind], request: str) -> Kind | None:
        """Take the agent's report about a request, if it is of this kind."""
        for told in self._agent.outcomes():
            if told.request in self.watched:
                self._told[type(told), told.request] = told
        found = self._told.pop((kind, request), None)
        assert found is None or isinstance(found, kind)
        return found

    def forget(self, request: str) -> None:
        """The request is over: drop its reports."""
        self.watched.discard(request)
        for kind in (Free, Finished, Held):
            self._told.pop((kind, request), None)
