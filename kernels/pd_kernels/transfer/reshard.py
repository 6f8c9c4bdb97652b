# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-decorators
"""Reshard: turn payloads of one tensor-parallel size into payloads of another size, in one launch.

This is for stored payloads whose consumers have another size. Codes and scales of a head move
unchanged with any codec, so nothing is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from pd_kernels.payload import (
    SECTION_BYTES,
    PlaneBytes,
    plane_bytes,
    scale_bytes_per_head,
)
from pd_kernels.transfer.reshard_kernel import SCALES, VECTORS, WARPS, reshard_heads


class PayloadShape(NamedTuple):
    """The shape that the payloads of one chunk share on all ranks.

    Attributes:
        codec: `raw`, `fp8_e4m3` or `int8`.
        heads: KV heads of a layer in the whole model.
        layers: layers of the chunk.
        tokens: tokens of the chunk.
        key_dim: elements of a token of one head of K (or of the latent).
        value_dim: elements of a token of one head of V; 0 if there is no V.
        element_bytes: bytes of an element in the producer's cache.

    Example:
        >>> shape = PayloadShape("raw", 8, 2, 100, 128, 128, element_bytes=2)
        >>> shape.nbytes(ranks=1), shape.nbytes(ranks=4)
        (819200, 204800)
    """

    codec: str
    heads: int
    layers: int
    tokens: int
    key_dim: int
    value_dim: int
    element_bytes: int

    @property
    def dims(self) -> tuple[int, ...]:
        return (self.key_dim, self.value_dim) if self.value_dim else (self.key_dim,)

    def held(self, ranks: int) -> int:
        """KV heads on each of `ranks` ranks. With more ranks than heads, several ranks hold the
        same head.

        Raises:
            ValueError: neither number divides the other.
        """
        if self.heads % ranks and ranks % self.heads:
            raise ValueError(f"{self.heads} heads on {ranks} ranks: one must divide the other")
        return max(1, self.heads // ranks)

    def first_head(self, rank: int, ranks: int) -> int:
        return rank * self.heads // ranks

    def parts(self, heads: int) -> tuple[PlaneBytes, ...]:
        """Sizes of the planes of one layer with `heads` heads."""
        return tuple(
            plane_bytes(self.codec, part == 0, heads, self.tokens, dim, self.element_bytes)
            for part, dim in enumerate(self.dims)
        )

    def nbytes(self, ranks: int) -> int:
        """Bytes of the payload of one of `ranks` ranks."""
        return self.layers * sum(part.total for part in self.parts(self.held(ranks)))

    def scale_bytes(self, part: int) -> int:
        """Bytes of the scales of one head, without the zeros behind them."""
        return scale_bytes_per_head(self.codec, part == 0, self.tokens, self.dims[part])

    def code_bytes(self, part: int) -> int:
        """Bytes of the codes of one head."""
        return self.parts(1)[part].codes


@dataclass(frozen=True, eq=False)
class Resharding:
    """The source payloads and the destination payloads of a resharding. `Resharding.of` makes it
    once for some slabs.

    Attributes:
        sources: the payload of each rank of the producer.
        destinations: memory for the payload of each rank of the consumer.
        payload: the shape that all payloads share.
        table: int64 `[head of a destination, 6]` on the device: address of the source's
            payload, its heads, and the head's place among them; then the same for the destination.
    """

    sources: tuple[torch.Tensor, ...]
    destinations: tuple[torch.Tensor, ...]
    payload: PayloadShape
    table: torch.Tensor

    @classmethod
    def of(
        cls,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        payload: PayloadShape,
    ) -> "Resharding":
        """Describe a resharding. This copies a small table to the device, and touches no payload.

        Args:
            sources: payload of each rank of the producer: uint8, dense, aligned to 16 bytes.
            destinations: memory for the payload of each rank of the consumer, likewise; may be
                longer.
            payload: what all of them have in common.

        Raises:
            ValueError: a slab is too short, or the number of heads does not divide among the ranks.

        Example:
            See `reshard`.
        """
        for slabs in (sources, destinations):
            expected = payload.nbytes(len(slabs))
            for slab in slabs:
                if slab.dtype != torch.uint8 or not slab.is_contiguous() or slab.numel() < expected:
                    raise ValueError(
                        f"slab of {slab.numel()} {slab.dtype}: wanted {expected} dense bytes of uint8"
                    )
        rows = []
        have, want = payload.held(len(sources)), payload.held(len(destinations))
        for rank, slab in enumerate(destinations):
            first = payload.first_head(rank, len(destinations))
            for head in range(first, first + want):
                holder, place = _holder(payload, len(sources), head)
                source = sources[holder].data_ptr(), have, place
                rows.append((*source, slab.data_ptr(), want, head - first))
        table = torch.tensor(rows, dtype=torch.int64, device=sources[0].device)
        return cls(tuple(sources), tuple(destinations), payload, table)


def _holder(payload: PayloadShape, ranks: int, head: int) -> tuple[int, int]:
    """The first of `ranks` ranks that holds a head, and the head's place in that rank's payload."""
    rank = head * ranks // payload.heads
    return rank, head - payload.first_head(rank, ranks)


def reshard(resharding: Resharding) -> None:
    """Write the payloads of the destinations.

    On a GPU this queues one kernel on the current stream and returns. CPU tensors, and rows of
    codes that are not multiples of 16 bytes, take plain torch. Nothing behind a payload is touched.

    Args:
        resharding: from `Resharding.of`.

    Example:
        The payloads of two ranks become one rank's payload, and come back.

        >>> import torch
        >>> from pd_kernels.transfer import PayloadShape, Resharding, reshard
        >>> shape = PayloadShape("int8", 4, 2, 100, 32, 32, element_bytes=2)
        >>> def slabs(ranks):
        ...     return [torch.empty(shape.nbytes(ranks), dtype=torch.uint8) for _ in range(ranks)]
        >>> parts, whole, back = slabs(2), slabs(1), slabs(2)
        >>> for part in parts:  # payloads without padding, all codes and scales 7
        ...     _ = part.fill_(7)
        >>> reshard(Resharding.of(parts, whole, shape))
        >>> reshard(Resharding.of(whole, back, shape))
        >>> [torch.equal(*pair) for pair in zip(parts, back)]
        [True, True]
    """
    if torch.compiler.is_compiling():
        sources, destinations = list(resharding.sources), list(resharding.destinations)
        _operator(sources, destinations, *resharding.payload)
    else:
        _run(resharding)


def _run(resharding: Resharding) -> None:
    payload, slabs = resharding.payload, (*resharding.sources, *resharding.destinations)
    element = payload.element_bytes if payload.codec == "raw" else 1
    whole = all(dim * element % SECTION_BYTES == 0 for dim in payload.dims)
    aligned = all(slab.is_cuda and slab.data_ptr() % SECTION_BYTES == 0 for slab in slabs)
    if whole and aligned:
        with torch.cuda.device(slabs[0].device):
            launch_reshard(resharding)
    else:
        reference_reshard(resharding)


@torch.library.custom_op("pd_kernels::reshard", mutates_args=("destinations",))
def _operator(
    sources: list[torch.Tensor],
    destinations: list[torch.Tensor],
    codec: str,
    heads: int,
    layers: int,
    tokens: int,
    key_dim: int,
    value_dim: int,
    element_bytes: int,
) -> None:
    payload = PayloadShape(codec, heads, layers, tokens, key_dim, value_dim, element_bytes)
    # A compiler may pass copies of the slabs. The kernel uses the addresses in the table, so the
    # table is made from the slabs passed.
    _run(Resharding.of(sources, destinations, payload))


@_operator.register_fake
def _(*_: object) -> None:
    return None


def launch_reshard(resharding: Resharding) -> None:
    """Run `reshard` with the kernel."""
    payload = resharding.payload
    last = len(payload.dims) - 1
    codes = [payload.code_bytes(part) // SECTION_BYTES for part in (0, last)]
    scales = [payload.scale_bytes(part) for part in (0, last)]
    tiles = max(triton.cdiv(max(codes), VECTORS), triton.cdiv(max(scales) // 2, SCALES))
    columns = resharding.table.shape[0] * len(payload.dims)
    reshard_heads[(columns, tiles, payload.layers)](
        table=resharding.table,
        key_scales=scales[0],
        value_scales=scales[1],
        key_codes=codes[0],
        value_codes=codes[1],
        PARTS=len(payload.dims),
        VECTORS=VECTORS,
        SCALES=SCALES,
        num_warps=WARPS,
    )


def reference_reshard(resharding: Resharding) -> None:
    """Compute `reshard` head by head, in plain torch."""
    payload = resharding.payload
    sources, destinations = resharding.sources, resharding.destinations
    want = payload.held(len(destinations))
    for rank, slab in enumerate(destinations):
        first = payload.first_head(rank, len(destinations))
        for head in range(first, first + want):
            holder, place = _holder(payload, len(sources), head)
            ours = _head_runs(payload, payload.held(len(sources)), place, sources[holder])
            for run, own in zip(_head_runs(payload, want, head - first, slab), ours, strict=True):
                run.copy_(own)
        for padding in _paddings(payload, want, slab):
            padding.zero_()


def _planes(
    payload: PayloadShape, heads: int, slab: torch.Tensor
) -> list[tuple[int, torch.Tensor]]:
    """Each plane of a payload: 0 for K or 1 for V, and its bytes."""
    parts = payload.parts(heads)
    sizes = [part.total for part in parts] * payload.layers
    pieces = slab[: sum(sizes)].split(sizes)
    return [(number % len(parts), piece) for number, piece in enumerate(pieces)]


def _head_runs(
    payload: PayloadShape, heads: int, head: int, slab: torch.Tensor
) -> list[torch.Tensor]:
    """The scales and the codes of one head, in each plane in turn."""
    runs = []
    for part, plane in _planes(payload, heads, slab):
        scale, code = payload.scale_bytes(part), payload.code_bytes(part)
        codes = plane[payload.parts(heads)[part].scales :]
        runs += [plane[head * scale : (head + 1) * scale], codes[head * code : (head + 1) * code]]
    return runs


def _paddings(payload: PayloadShape, heads: int, slab: torch.Tensor) -> list[torch.Tensor]:
    """The zeros behind the scales of each plane."""
    return [
        plane[heads * payload.scale_bytes(part) : payload.parts(heads)[part].scales]
        for part, plane in _planes(payload, heads, slab)
    ]
