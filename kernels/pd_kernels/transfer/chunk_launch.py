# SPDX-License-Identifier: Apache-2.0
"""The arguments of one gather or scatter: tokens, planes, and the memory of their payload."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from pd_kernels.checksum import ROW_BYTES
from pd_kernels.payload import SECTION_BYTES
from pd_kernels.transfer.planes import MAX_LAYERS, Planes, PlaneSizes
from pd_kernels.transfer.sums import COLUMN_WORDS

TRITON: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}
"""Triton's dtype for each of torch's."""

WORDS: dict[int, Any] = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""For a size in bytes, the dtype that moves elements of this size unchanged."""

_MAX_PLANE_ELEMENTS = 1 << 28
"""Kernels count the elements of a plane in 32 bits."""

_MAX_HEAD_ELEMENTS = 1 << 26
"""A head of a plane is cut into tiles of at least 2,048 elements, and CUDA allows 65,535 tiles."""


@dataclass(frozen=True, eq=False)
class ChunkLaunch:
    """One call of `gather_pages` or `scatter_pages`; the attributes are their arguments.

    Attributes:
        planes: K and V of the layers, in one cache.
        pages: int32 `[pages]`, the engine's pages that hold the chunk.
        slot: uint8, memory for the payload.
        first_token: the chunk's first token, counted from the start of the first page.
        tokens: tokens of the chunk; for `verbatim`, pages of `planes.views`.
        sums: the sums to which the payload's sums are added, or None.
    """

    planes: Planes
    pages: torch.Tensor
    slot: torch.Tensor
    first_token: int
    tokens: int
    sums: torch.Tensor | None

    @property
    def verbatim(self) -> bool:
        return self.planes.codec == "verbatim"

    @property
    def sizes(self) -> PlaneSizes:
        return self.planes.sizes(self.tokens)

    @property
    def payload(self) -> torch.Tensor:
        """The part of the slot that the payload fills."""
        return self.slot[: self.planes.nbytes(self.tokens)]

    def check(self) -> None:
        """Raise ValueError if the arguments contradict each other."""
        expected = self.planes.nbytes(self.tokens)
        if self.slot.dtype != torch.uint8 or not self.slot.is_contiguous():
            raise ValueError(f"slot of {self.slot.dtype}: must be dense bytes of uint8")
        if self.slot.numel() < expected:
            raise ValueError(f"slot of {self.slot.numel()} bytes: the chunk has {expected} bytes")
        size = self.planes.page_size
        places = self.pages.numel() * size
        if self.tokens < 1 or not 0 <= self.first_token <= places - self.tokens:
            raise ValueError(
                f"tokens {self.first_token}-{self.first_token + self.tokens}: must be within the "
                f"{self.pages.numel()} pages of {size} tokens"
            )
        if self.pages.dtype != torch.int32:
            raise ValueError(f"pages of {self.pages.dtype}: must be int32")
        if self.sums is not None and self.sums.numel() < COLUMN_WORDS + -(-expected // ROW_BYTES):
            raise ValueError(
                f"{self.sums.numel()} sums: too few for {expected} bytes, see new_sums()"
            )

    @property
    def fits_kernels(self) -> bool:
        """Whether kernels can take the chunk: it is on a GPU, aligned, and in planes that kernels
        can index."""
        planes = self.planes
        return (
            planes.table.is_cuda
            and self.slot.is_cuda
            and self.slot.data_ptr() % SECTION_BYTES == 0
            and self.whole_sections
            and self.indexable
        )

    @property
    def indexable(self) -> bool:
        """Whether CUDA allows the launch's number of programs, and 32 bits can count the
        elements."""
        head = self.tokens * max(self.planes.dims)
        return (
            head <= _MAX_HEAD_ELEMENTS
            and head * self.planes.heads <= _MAX_PLANE_ELEMENTS
            and self.planes.layers <= MAX_LAYERS
        )

    @property
    def whole_sections(self) -> bool:
        """Whether each token of a head is a whole number of sections. A section is 16 bytes if
        elements are copied, 16 elements if they are coded or converted."""
        planes = self.planes
        copied = planes.codec == "raw" and planes.as_stored
        element = planes.source.itemsize if copied else 1
        return all(dim * element % SECTION_BYTES == 0 for dim in planes.dims)

    def vectors(self, vector_codes: int) -> tuple[int, int]:
        """Vectors of `vector_codes` codes in one token of one head, for K and for V. Without V, K's
        number stands for both."""
        widths = [dim // vector_codes for dim in self.planes.dims]
        return widths[0], widths[-1]

    @property
    def most_scale_sections(self) -> int:
        """The larger number of sections of scales: of the K plane or of the V plane."""
        return max(plane.scales for plane in self.sizes.parts) // SECTION_BYTES

    def operands(self, summed: bool) -> dict[str, Any]:
        """The arguments that all gather and scatter kernels share, by the names of their
        parameters.

        Args:
            summed: whether the kernel adds to the sums. If not, the kernel gets an arbitrary
                pointer and does not use it.
        """
        planes, sizes = self.planes, self.sizes
        view_tokens = planes.views[0].shape[2]
        return {
            "table": planes.table,
            "pages": self.pages,
            "slot": self.slot,
            "sums": self.sums if summed else planes.table,
            "first": self.first_token,
            "tokens": self.tokens,
            "layer_sections": sizes.total // SECTION_BYTES,
            "key_sections": sizes.parts[0].total // SECTION_BYTES,
            "key_scales": sizes.parts[0].scales // SECTION_BYTES,
            "value_scales": sizes.parts[-1].scales // SECTION_BYTES,
            "PARTS": planes.parts,
            "VIEW": view_tokens,
            "PAGES": planes.page_size // view_tokens,
            "WIDE": planes.wide,
        }
