# SPDX-License-Identifier: Apache-2.0
"""Gathers and scatters on a device, begun one call ahead. The copies of one chunk run while the caller hashes,
posts or reports another.

The caller says which call will probably come next. Its work begins at once, and is used if that call comes. If
not, the work is dropped, and its result counts for nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pd_connector.memory.device_bytes import Payload, address_of
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route

if TYPE_CHECKING:
    from pd_connector.pages.kernel_pages import KernelPages, Moving


class _Gather(NamedTuple):
    """The arguments of one `OneAhead.gather`."""

    route: Route
    chunk: Chunk
    pages: Sequence[int]
    payload: Payload
    fence: torch.cuda.Event | None

    def same(self, other: "_Gather") -> bool:
        """Whether both gather the same bytes into the same memory."""
        return (
            self.route is other.route
            and self.chunk == other.chunk
            and self.fence is other.fence
            and address_of(self.payload) == address_of(other.payload)
            and list(self.pages) == list(other.pages)
        )


class OneAhead:
    """Used by one thread, with the cache's stream current in `gather` and `scatter`.

    Args:
        stream: the cache's own stream; None on a CPU.
    """

    def __init__(self, kernels: "KernelPages", stream: "torch.cuda.Stream | None") -> None:
        self._kernels = kernels
        self._stream = stream
        self._next_gather: _Gather | None = None
        self._next_payload: Payload | None = None
        self._begun: tuple[_Gather, Moving] | None = None
        self._settled = True

    def gather(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        payload: Payload,
        fence: torch.cuda.Event | None,
    ) -> bytes | None:
        """Fill a payload, uint8 `[chunk.nbytes(route)]`, with a chunk. Returns its checksum, or None if kernels cannot
        take the chunk."""
        gather = _Gather(route, chunk, pages, payload, fence)
        moving = self._take(gather) or self._begin(gather)
        following, self._next_gather = self._next_gather, None
        if following is not None and moving is not None and not _share_slot(gather, following):
            self._begin_early(following)
        return moving.finish() if moving is not None else None

    def gather_next(
        self,
        route: Route,
        chunk: Chunk,
        pages: Sequence[int],
        payload: Payload,
        fence: torch.cuda.Event | None,
    ) -> None:
        """Announce the `gather` that probably follows the next one."""
        self._next_gather, self._settled = _Gather(route, chunk, pages, payload, fence), False

    def scatter(
        self, route: Route, chunk: Chunk, pages: Sequence[int], payload: Payload
    ) -> bytes | None:
        """Scatter; returns the payload's checksum, or None if kernels cannot take the chunk."""
        moving = self._kernels.begin_scatter(route, chunk, pages, payload)
        following, self._next_payload = self._next_payload, None
        if following is not None and moving is not None:
            self._kernels.stage(following)
        return moving.finish() if moving is not None else None

    def scatter_next(self, payload: Payload) -> None:
        """The probable payload of `scatter` after the next call."""
        self._next_payload, self._settled = payload, False

    def settle(self) -> None:
        """Drop begun work, after waiting for its end."""
        if self._settled:
            return
        self._next_gather = self._next_payload = None
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[1].finish()
        self._kernels.settle()
        self._settled = True

    def _take(self, gather: _Gather) -> "Moving | None":
        """This gather, if it was begun early; otherwise None. Any other gather that was begun early is dropped."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        if begun[0].same(gather):
            return begun[1]
        begun[1].finish()  # its slot is lent again
        return None

    def _begin(self, gather: _Gather) -> "Moving | None":
        return self._kernels.begin_gather(gather.route, gather.chunk, gather.pages, gather.payload)

    def _begin_early(self, gather: _Gather) -> None:
        if self._stream is not None and gather.fence is not None:
            self._stream.wait_event(gather.fence)
        try:
            moving = self._begin(gather)
        except (IndexError, ValueError):  # the gather's own call will raise it
            return
        if moving is not None:
            self._begun = gather, moving


def _share_slot(first: _Gather, second: _Gather) -> bool:
    """Whether both gathers fill the same slot. If so, the gather that was expected between them did not happen."""
    return address_of(first.payload) == address_of(second.payload)
