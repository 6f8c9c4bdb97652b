# SPDX-License-Identifier: Apache-2.0
"""What a producer is told of its engine's KV, and what it has others do."""

from collections.abc import Sequence
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
    """KV of one request, as far as it has been computed. A later offer replaces it."""

    transfer: str
    request: str
    pages: tuple[Sequence[int], ...]  # page ids by table, from the prompt's start; -1: not kept
    identity: bytes
    prompt_tokens: int
    tokens: int  # [0, tokens) are computed in all layers
    final: bool  # the prefill has ended: from now on the pages are kept until they are freed
    words: FinalToken | None = None  # what else the engine decided; with the final offer
    provisional: bool = False  # it may be withdrawn, as wrong, when the prefill has ended
    # The states in pages of `state` groups stand after tokens [0, state_token), once the prefill has ended; 0: none do.
    # Each such table lists one page, in the final offer at the latest.
    state_token: int = 0

    def problem(
        self, message: messages.Open, routes: Sequence[Route], slot_bytes: int
    ) -> tuple[Cause, str] | None:
        """Why this KV is not what a consumer asks for, to pass along these routes; or None."""
        if message.identity != self.identity:
            return Cause.TOKENS, "the pages belong to other tokens, images, salt or adapter"
        if not message.first_token <= message.stop_token <= self.prompt_tokens:
            asked = f"tokens {message.first_token}-{message.stop_token}"
            return Cause.TOKENS, f"{asked} of a prompt of {self.prompt_tokens}"
        least = least_chunk_limit(routes, slot_bytes)
        if not least <= message.chunk_bytes <= slot_bytes:
            fits = f"{least} to {slot_bytes} (a slot)"
            return Cause.GEOMETRY, f"chunks of {message.chunk_bytes} bytes: here {fits}"
        return self.state_problem(message, routes)

    def state_problem(
        self, message: messages.Open, routes: Sequence[Route]
    ) -> tuple[Cause, str] | None:
        """Why its states do not stand where a consumer wants them; or None."""
        wanted = message.state_token or 0
        if not wanted or wanted == self.state_token or all(r.section is None for r in routes):
            return None
        here = f"stand after {self.state_token} tokens" if self.state_token else "are not kept"
        return Cause.TOKENS, f"states {here}, wanted after {wanted}"


class Step(NamedTuple):
    """How far a prefill step that is under way has come."""

    tokens: int  # [0, tokens) will be computed when it has ended
    stop_layer: int  # and are so already in the model's layers below this one


class Reply(NamedTuple):
    """Send this message to the consumer of this session."""

    session: SessionId
    message: messages.Message


class Free(NamedTuple):
    """The pages of this request are no longer needed; without a cause they were delivered."""

    request: str
    cause: Cause | None


class SendChunk(NamedTuple):
    """Send this chunk to the consumer, against a landing slot that it has granted."""

    transfer: str
    request: str
    session: SessionId
    route: Route
    chunk: Chunk
    pages: Sequence[int]  # page ids that hold the chunk's tokens, in prompt order
    identity: bytes
    slot: int
    direct: bool  # it may be read where it lies: by this consumer, and the pages are leased
    early: bool  # some of what this consumer asked for is still to be computed

    @property
    def kept(self) -> bool:
        """Whether the engine still has all of these pages."""
        wanted = len(self.chunk.source_pages(self.route))
        return len(self.pages) == wanted and min(self.pages) >= 0

    def header(self, epoch: int, nbytes: int, checksum: bytes, passed: str) -> ChunkHeader:
        """What this producer says of the chunk."""
        return header_of(
            self.chunk,
            transfer=self.transfer,
            epoch=epoch,
            identity=self.identity,
            codec=self.route.codec,
            nbytes=nbytes,
            checksum=checksum,
            passed=passed,
        )


Action = Reply | Free
