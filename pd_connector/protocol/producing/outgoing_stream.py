# SPDX-License-Identifier: Apache-2.0
"""A producer's record of one consumer rank that reads a transfer: the chunks left to send, and its granted slots."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_connector.errors import Cause
from pd_connector.plan.chunks import Chunk, plan
from pd_connector.plan.route import Route
from pd_connector.plan.sizes import bytes_per_token
from pd_connector.protocol.producing.outgoing import Offer, OutgoingChunk, Step
from pd_connector.protocol.wire import messages

_Layers = tuple[int, int, int]
"""Some layers of a route: the route, the first layer, the stop layer."""


@dataclass(slots=True)
class LayerQueue:
    """The unsent chunks of the same layers, in the order of their tokens. If the first is not computed, none is."""

    last_layer: int  # by its number in the model
    chunks: deque[Chunk] = field(default_factory=deque)
    of_state: bool = False  # there is no state before the prefill has ended

    def computed_in(self, step: Step) -> bool:
        """Whether the step that is still running has computed the first chunk."""
        return (
            self.chunks[0].stop_token <= step.tokens
            and self.last_layer < step.stop_layer
            and not self.of_state
        )


@dataclass(slots=True)
class OutgoingStream:
    """A consumer rank that has opened the transfer."""

    message: messages.Open
    routes: Sequence[Route]
    credits: deque[int]  # landing slots that the consumer has granted and no chunk has taken
    leased_only: bool = False  # no chunk is sent before the prefill has ended
    planned: int = 0  # chunks
    unsent: int = 0  # chunks
    token_bytes: float = 0.0  # bytes of a token on the wire, in all layers
    accepted: bool = False
    writing: int = 0  # writes that have not ended
    last_gathered: float = float("-inf")  # the engine's step in which the last chunk was gathered
    queues: dict[_Layers, LayerQueue] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """Whether a chunk was sent, or a slot is free for one."""
        return bool(self.credits) or self.unsent < self.planned

    def prepare(self) -> tuple[Cause, str] | None:
        """Plan the chunks. Returns why that is not possible, as (cause, detail), or None."""
        opening = self.message
        try:
            chunks = plan(
                self.routes,
                opening.first_token,
                opening.stop_token,
                opening.chunk_bytes,
                streamed=opening.wait,
                state_token=opening.state_token or 0,
            )
        except ValueError as error:
            return Cause.GEOMETRY, str(error)
        for chunk in chunks:
            layers = _layers(chunk)
            if layers not in self.queues:
                route = self.routes[chunk.route]
                self.queues[layers] = LayerQueue(
                    chunk.layers(route)[-1], of_state=route.section is not None
                )
            self.queues[layers].chunks.append(chunk)
        self.planned = self.unsent = len(chunks)
        while len(self.credits) > self.planned:
            self.credits.pop()
        self.token_bytes = bytes_per_token(self.routes)
        return None

    def credit(self, slots: Sequence[int]) -> None:
        """Add slots that the consumer has granted. Slots beyond the number of unsent chunks are ignored."""
        room = self.unsent - len(self.credits)
        self.credits.extend(slots[: max(0, room)])

    def link_s(self, tokens: int) -> float:
        """Seconds that the link takes for `tokens` tokens; infinity if its speed was not measured."""
        rate = self.message.bytes_per_s
        return self.token_bytes * tokens / rate if rate else float("inf")

    def take_chunk(self, offer: Offer, step: Step | None) -> Chunk | None:
        """Take the first chunk of the plan that is computed; None if there is none. The caller takes a landing slot
        from `credits` for it."""
        best: LayerQueue | None = None
        least = self.planned
        for queue in self.queues.values():
            if not queue.chunks or (first := queue.chunks[0]).sequence >= least:
                continue
            if queue.of_state:
                computed = offer.final
            else:
                computed = first.stop_token <= offer.tokens
            if computed or (step is not None and queue.computed_in(step)):
                best, least = queue, first.sequence
        if best is None:
            return None
        self.unsent -= 1
        self.writing += 1
        return best.chunks.popleft()

    def unsend(self, chunk: OutgoingChunk) -> None:
        """Put back the chunk that was taken last, with its landing slot. It comes next again."""
        self.writing -= 1
        self.unsent += 1
        self.credits.appendleft(chunk.slot)
        self.queues[_layers(chunk.planned)].chunks.appendleft(chunk.planned)

    def check_integrity(self) -> None:
        """Raises RuntimeError if counts disagree."""
        waiting = sum(len(queue.chunks) for queue in self.queues.values())
        if waiting != self.unsent or not 0 <= self.unsent <= self.planned:
            raise RuntimeError(
                f"{waiting} chunks are queued, wanted {self.unsent} of {self.planned} planned"
            )
        if not 0 <= self.writing <= self.planned - self.unsent:
            raise RuntimeError(
                f"{self.writing} writes are under way, {self.planned - self.unsent} chunks were sent"
            )
        if self.writing and not self.accepted:
            raise RuntimeError("chunks were sent to a consumer that was not accepted")


def _layers(chunk: Chunk) -> _Layers:
    return chunk.route, chunk.first_layer, chunk.stop_layer
