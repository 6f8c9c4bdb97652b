# SPDX-License-Identifier: Apache-2.0
"""The records that pass through a producer's state machine: the engine's offers, its actions, and the chunks that it sends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd_connector.errors import Cause
from pd_connector.plan.chunks import Chunk, least_chunk_limit
from pd_connector.plan.route import Route
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.final_token import FinalToken
from pd_connector.protocol.wire.header import ChunkHeader, header_of

SessionId = bytes
"""The routing id of a consumer's connection."""


class Offer(NamedTuple):
    """The KV of one request, as far as it is computed. A later offer replaces an earlier one."""

    transfer: str
    request: str
    pages: tuple[Sequence[int], ...]  # page ids by table, from the prompt's start; -1: not kept
    identity: bytes
    prompt_tokens: int
    tokens: int  # [0, tokens) are computed in all layers
    final: bool  # the prefill has ended: from now on the pages are kept until they are freed
    final_token: FinalToken | None = None  # with the final offer, if the engine has chosen it
    provisional: bool = False  # it may turn out to be wrong when the prefill has ended
    # In the final offer: the pages of `state` groups hold the states after tokens [0, state_token);
    # 0: they hold none. Each such table lists that page first.
    state_token: int = 0
    # The page behind it has the states after [0, boundary_token), for audits; 0: there is none.
    boundary_token: int = 0
    # A window behind a prefix hit was computed without the tokens before it, so other engines compute other KV.
    approximated: bool = False

    def problem(
        self, message: messages.Open, routes: Sequence[Route], slot_bytes: int
    ) -> tuple[Cause, str] | None:
        """Why this KV does not fit a consumer's `Open`, as (cause, detail); None if it fits.

        Args:
            routes: the routes along which the KV would pass.
            slot_bytes: size of a send slot.
        """
        if message.identity != self.identity:
            return Cause.TOKENS, "the pages belong to other tokens, images, salt or adapter"
        if not message.first_token <= message.stop_token <= self.prompt_tokens:
            tokens = f"tokens {message.first_token}-{message.stop_token}"
            return Cause.TOKENS, f"{tokens} of a prompt of {self.prompt_tokens}"
        least = least_chunk_limit(routes, slot_bytes)
        if not least <= message.chunk_bytes <= slot_bytes:
            fits = f"{least} to {slot_bytes} (a slot)"
            return Cause.GEOMETRY, f"chunks of {message.chunk_bytes} bytes: here {fits}"
        return self.late_problem(message, routes)

    def late_problem(
        self, message: messages.Open, routes: Sequence[Route]
    ) -> tuple[Cause, str] | None:
        """Why a later offer of the same prompt does not fit the consumer's `Open` any more, as (cause, detail), or
        None: its states are at another position than the consumer needs, or its KV is not fit for a comparison."""
        if message.compares is True and self.approximated:
            return Cause.WINDOW, "the engine replayed a window behind a prefix hit: not compared"
        needed = message.state_token or 0
        offered = 0, self.state_token, self.boundary_token
        if needed in offered or all(r.section is None for r in routes):
            return None
        here = f"stand after {self.state_token} tokens" if self.state_token else "are not kept"
        return Cause.TOKENS, f"states {here}, wanted after {needed}"


class Step(NamedTuple):
    """The progress of a prefill step that is under way."""

    tokens: int  # [0, tokens) are computed when the step has ended
    stop_layer: int  # they are computed now in the model's layers below this one


class Reply(NamedTuple):
    """Send this message to the consumer of this session."""

    session: SessionId
    message: messages.Message


class Free(NamedTuple):
    """The pages of this request are no longer needed. `cause` is None if they were delivered."""

    request: str
    cause: Cause | None


@dataclass(slots=True)
class OutgoingChunk:
    """One chunk on its way to a consumer: the producer's only record of it, from `Producer.next_send` until the
    consumer has it. The state machine fills in the first part, and the send pipeline the second.

    Attributes:
        planned: the plan's chunk: its number, layers and tokens.
        pages: ids of this engine's pages that hold the chunk's tokens, in prompt order; -1: no longer kept.
        identity: fingerprint of the tokens whose KV it is.
        slot: the consumer's landing slot, granted for this chunk.
        direct: the consumer may read the chunk in the leased pages.
        early: whether the prefill of the tokens that this consumer fetches has not ended.
        send_slot: the producer's send slot with the payload; None if it is sent or read from its pages.
        nbytes: bytes of the payload.
        checksum: checksum of the payload; empty if the transport verifies every byte.
        deadline: the chunk is late after this time, in seconds on the agent's clock.
        session_limit: most chunks of this kind that its session may have under way at a time.
        in_order: it arrives after the chunks that were written to its session before it.
    """

    transfer: str
    request: str
    session: SessionId
    route: Route
    planned: Chunk
    pages: Sequence[int]
    identity: bytes
    slot: int
    direct: bool
    early: bool

    send_slot: int | None = None
    nbytes: int = 0
    checksum: bytes = b""
    deadline: float = math.inf
    session_limit: float = math.inf
    in_order: bool = False

    @property
    def kept(self) -> bool:
        """Whether the engine still has all of these pages."""
        count = len(self.planned.source_pages(self.route))
        return len(self.pages) == count and min(self.pages) >= 0

    def header(self, epoch: int, passed: str) -> ChunkHeader:
        """The header that travels with the chunk.

        Args:
            epoch: epoch of this process.
            passed: the coarsest codec in which KV had passed before, on which this KV may have been computed.
        """
        return header_of(
            self.planned,
            transfer=self.transfer,
            epoch=epoch,
            identity=self.identity,
            codec=self.route.codec,
            nbytes=self.nbytes,
            checksum=self.checksum,
            passed=passed,
        )


Action = Reply | Free
