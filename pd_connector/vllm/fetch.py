# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side knows of a request whose prompt is computed elsewhere."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from pd_connector.protocol.incoming import Load
from pd_connector.protocol.peers import Peer, Source

Pair = tuple[tuple[Source, ...], str]
"""A producer, by the addresses of its ranks, and an adapter."""


class Stage(enum.Enum):
    """How far a fetch is."""

    WATCHED = enum.auto()  # waits for its KV to begin to come; holds no pages here
    HELD = enum.auto()  # waits for pages here; its KV is kept there
    LOADING = enum.auto()
    AUDITED = enum.auto()  # computed here, to be compared with its KV: `audits.Audits` has it
    OVER = enum.auto()  # loaded, failed or not needed: from now on an ordinary request


@dataclass(slots=True)
class Fetch:
    """A request whose prompt is computed elsewhere."""

    transfer: str
    identity: bytes  # of its prompt
    adapter: str  # name and content; empty for none
    peers: tuple[Peer, ...]
    wait: bool
    tokens: (
        int  # that are wanted at most: the last one of a prompt is computed here, for its logits
    )
    stage: Stage
    computed_tokens: int = 0  # found in the prefix cache when vLLM asked last
    failed: bool = False  # its load has failed: it is computed here
    outcome: str = ""  # what has become of it, as the counter `handoffs` names it
    had_room: bool = False  # there was room for it when vLLM asked last, after its load had failed

    @property
    def waiting(self) -> bool:
        """Whether it has no pages yet."""
        return self.stage in (Stage.WATCHED, Stage.HELD)

    @property
    def pair(self) -> Pair:
        return tuple(peer.source for peer in self.peers), self.adapter

    def load(
        self,
        request: str,
        stop_token: int,
        pages: tuple[Sequence[int], ...],
        *,
        compares: bool = False,
    ) -> Load:
        """The command that fetches tokens from the first that was not cached to `stop_token`."""
        return Load(
            request=request,
            transfer=self.transfer,
            peers=self.peers,
            identity=self.identity,
            first_token=self.computed_tokens,
            stop_token=stop_token,
            pages=pages,
            wait=self.wait,
            compares=compares,
            adapter=self.adapter,
        )
