# SPDX-License-Identifier: Apache-2.0
"""One chunk of some blocks: what a gather or a scatter is called with, and what kernels are told."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from pd_kernels.transfer.blocks import MAX_LAYERS, Blocks, LayerBytes
from pd_kernels.transfer.payload import SECTION_BYTES
from pd_kernels.transfer.sums import COLUMNS, COPIES, ROW_BYTES

TRITON: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}
WORDS: dict[int, Any] = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

_MAX_ELEMENTS = 1 << 28
"""Of a block: with it 32-bit indices within a block hold."""
_MAX_HEAD_ELEMENTS = 1 << 26
"""Of a head of a block: with it tiles, of 2,048 elements at least, fit a launch's second extent."""


@dataclass(frozen=True, eq=False)
class ChunkLaunch:
    """Tokens of `blocks`, and the memory that holds their payload."""

    blocks: Blocks
    pages: torch.Tensor
    slot: torch.Tensor
    first_token: int
    tokens: int
    sums: torch.Tensor | None

    @property
    def verbatim(self) -> bool:
        return self.blocks.codec == "verbatim"

    @property
    def extent(self) -> LayerBytes:
        return self.blocks.extent(self.tokens)

    @property
    def payload(self) -> torch.Tensor:
        """The slot's part that the payload fills."""
        return self.slot[: self.blocks.nbytes(self.tokens)]

    def check(self) -> None:
        """Raise ValueError where the arguments cannot belong together."""
        wanted = self.blocks.nbytes(self.tokens)
        if self.slot.dtype != torch.uint8 or not self.slot.is_contiguous():
            raise ValueError(f"slot of {self.slot.dtype}: must be dense bytes of uint8")
        if self.slot.numel() < wanted:
            raise ValueError(f"slot of {self.slot.numel()} bytes: the chunk has {wanted} bytes")
        size = self.blocks.page_size
        places = self.pages.numel() * size
        if self.tokens < 1 or not 0 <= self.first_token <= places - self.tokens:
            raise ValueError(
                f"tokens {self.first_token}-{self.first_token + self.tokens}: must lie within the "
                f"{self.pages.numel()} pages of {size} tokens"
            )
        if self.pages.dtype != torch.int32:
            raise ValueError(f"pages of {self.pages.dtype}: must be int32")
        if self.sums is not None and self.sums.numel() < COPIES * COLUMNS + -(-wanted // ROW_BYTES):
            raise ValueError(
                f"{self.sums.numel()} sums: too few for {wanted} bytes, see new_sums()"
            )

    @property
    def fits_kernels(self) -> bool:
        """Whether it lies on a GPU, aligned, in blocks that kernels can index."""
        blocks = self.blocks
        return (
            blocks.table.is_cuda
            and self.slot.is_cuda
            and self.slot.data_ptr() % SECTION_BYTES == 0
            and self.whole_sections
            and self.indexable
        )

    @property
    def indexable(self) -> bool:
        """Whether launches can have as many programs, and kernels count the elements in 32 bits."""
        head = self.tokens * max(self.blocks.dims)
        return (
            head <= _MAX_HEAD_ELEMENTS
            and head * self.blocks.heads <= _MAX_ELEMENTS
            and self.blocks.layers <= MAX_LAYERS
        )

    @property
    def whole_sections(self) -> bool:
        """Whether every row of codes is whole sections of 16 bytes, and of 16 elements where these
        are coded or converted."""
        blocks = self.blocks
        copied = blocks.codec == "raw" and blocks.as_stored
        element = blocks.source.itemsize if copied else 1
        return all(dim * element % SECTION_BYTES == 0 for dim in blocks.dims)

    def vectors(self, vector_bytes: int) -> list[int]:
        """Of a token of one head, K and V (twice K where there is no V), `vector_bytes` codes each."""
        widths = [dim // vector_bytes for dim in self.blocks.dims]
        return [widths[0], widths[-1]]

    def places(self) -> dict[str, int]:
        """Where blocks lie, in sections of 16 bytes, as all kernels are told."""
        parts = self.extent.parts
        return {
            "layer_sections": self.extent.layer_bytes // SECTION_BYTES,
            "key_sections": parts[0].total // SECTION_BYTES,
            "key_scales": parts[0].scales // SECTION_BYTES,
            "value_scales": parts[-1].scales // SECTION_BYTES,
        }

    def paging(self) -> dict[str, Any]:
        """What all kernels know of the cache when they are compiled."""
        view_tokens = self.blocks.views[0].shape[2]
        return {
            "PARTS": self.blocks.parts,
            "VIEW": view_tokens,
            "PAGES": self.blocks.page_size // view_tokens,
            "WIDE": self.blocks.wide,
        }
