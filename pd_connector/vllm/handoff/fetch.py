# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's record of a request whose prompt is computed elsewhere."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.wire.peers import Peer, Source

Pair = tuple[tuple[Source, ...], str]
"""A producer, by the addresses of its ranks, and an adapter."""


class Stage(enum.Enum):
    """The state of a fetch."""

    WATCHED = enum.auto()  # waits until its KV begins to arrive; holds no pages here
    HELD = enum.auto()  # waits for pages here; the producer keeps its KV
    LOADING = enum.auto()
    AUDITED = enum.auto()  # computed here, to compare with its KV (`audits.Audits`)
    OVER = enum.auto()  # loaded, failed or not needed; now an ordinary request


@dataclass(slots=True)
class Fetch:
    """A request whose prompt is computed elsewhere."""

    transfer: str
    identity: bytes  # of its prompt
    adapter: str  # name and content; empty for none
    peers: tuple[Peer, ...]
    wait: bool
    tokens: int  # most wanted tokens; a prompt's last token is computed here, for its logits
    stage: Stage
    computed_tokens: int = 0  # tokens in the prefix cache when vLLM asked last
    outdated: bool = False  # its adapter was replaced: its KV is not wanted
    failed: bool = False  # its load has failed: it is computed here
    outcome: str = ""  # its outcome, as the counter `handoffs` names it
    skips_cache: bool = (
        False  # it reads no prefix cache, only to be audited; its client did not ask for that
    )
    had_room: bool = False  # there was room when vLLM asked last, after the load failed

    @property
    def waiting(self) -> bool:
        """Whether the request has no pages yet."""
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
        state_token: int = 0,
    ) -> Load:
        """The command that fetches the tokens that are not cached, up to `stop_token`, and the states after
        `state_token` tokens."""
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
            state_token=state_token,
        )
