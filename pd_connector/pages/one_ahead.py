# SPDX-License-Identifier: Apache-2.0
"""Gathers and scatters of a device, with the next one begun before the one before is dealt with: copies of one chunk go
on while the caller sums up, posts or reports another.

The caller says what will probably come next. It is begun then, and used if it does come. If not, it is dropped: what
it read or copied counts for nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pd_connector.memory.device_bytes import Payload, address_of
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route

if TYPE_CHECKING:
    from pd_connector.pages.kernel_pages import KernelPages
    from pd_connector.pages.moving import Moving


class GatherCall(NamedTuple):
    """The arguments of one `PagedCache.gather`; the slot has exactly the payload's bytes."""

    route: Route
    chunk: Chunk
    pages: Sequence[int]
    slot: Payload
    fence: torch.cuda.Event | None

    def same(self, other: "GatherCall") -> bool:
        """Whether both ask for the same bytes in the same place."""
        return (
            self.route is other.route
            and self.chunk == other.chunk
            and self.fence is other.fence
            and address_of(self.slot) == address_of(other.slot)
            and list(self.pages) == list(other.pages)
        )


class OneAhead:
    """Used by one thread, with the cache's stream current in `gather` and `scatter`.

    Args:
        stream: the cache's; None on CPU.
    """

    def __init__(self, kernels: "KernelPages", stream: "torch.cuda.Stream | None") -> None:
        self._kernels = kernels
        self._stream = stream
        self._next_call: GatherCall | None = None
        self._next_payload: Payload | None = None
        self._begun: tuple[GatherCall, Moving] | None = None
        self._settled = True

    def gather(self, call: GatherCall) -> bytes | None:
        """Gather; returns the payload's checksum, or None where kernels do not take the chunk."""
        moving = self._take(call) or self._begin(call)
        following, self._next_call = self._next_call, None
        if following is not None and moving is not None and not _share_slot(call, following):
            self._begin_early(following)
        return moving.finish() if moving is not None else None

    def gather_next(self, call: GatherCall) -> None:
        """What `gather` will probably be called with after the next call."""
        self._next_call, self._settled = call, False

    def scatter(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Payload
    ) -> bytes | None:
        """Scatter; returns the payload's checksum, or None where kernels do not take the chunk."""
        moving = self._kernels.begin_scatter(route, chunk, pages, payload)
        following, self._next_payload = self._next_payload, None
        if following is not None and moving is not None:
            self._kernels.stage(following)
        return moving.finish() if moving is not None else None

    def scatter_next(self, payload: Payload) -> None:
        """What `scatter` will probably be called with after the next call."""
        self._next_payload, self._settled = payload, False

    def settle(self) -> None:
        """Drop what was begun, once it is no longer under way."""
        if self._settled:
            return
        self._next_call = self._next_payload = None
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[1].finish()
        self._kernels.settle()
        self._settled = True

    def _take(self, call: GatherCall) -> "Moving | None":
        """This gather, if it was begun. Another one that was begun in its place is dropped."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        if begun[0].same(call):
            return begun[1]
        begun[1].finish()  # its slot is lent to others
        return None

    def _begin(self, call: GatherCall) -> "Moving | None":
        return self._kernels.begin_gather(call.route, call.chunk, call.pages, call.slot)

    def _begin_early(self, call: GatherCall) -> None:
        if self._stream is not None and call.fence is not None:
            self._stream.wait_event(call.fence)
        try:
            moving = self._begin(call)
        except (IndexError, ValueError):  # its own call will raise it
            return
        if moving is not None:
            self._begun = call, moving


def _share_slot(one: GatherCall, other: GatherCall) -> bool:
    """Whether both fill the same slot: the call that was to come between them was not made."""
    return address_of(one.slot) == address_of(other.slot)
