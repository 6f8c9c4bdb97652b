# SPDX-License-Identifier: Apache-2.0
"""Which part of a cache moves, and how it is coded: made once per cache, route and layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from pd_kernels.transfer.payload import CODECS, SECTION_BYTES, BlockBytes, block_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
MAX_LAYERS = 65_535  # the third extent of a launch


class Stored(NamedTuple):
    """How a cache stores elements: value = stored * scale.

    Attributes:
        dtype: one of `DTYPES`.
        scales: of each block, in FP8 caches; empty for 1.
    """

    dtype: torch.dtype
    scales: tuple[float, ...] = ()

    @property
    def is_fp8(self) -> bool:
        return bool(self.dtype == torch.float8_e4m3fn)

    def scale(self, block: int) -> float:
        return self.scales[block] if self.scales else 1.0


class LayerBytes(NamedTuple):
    """Bytes of a chunk's blocks: K (or the latent), then V where there is one."""

    parts: tuple[BlockBytes, ...]

    @property
    def layer_bytes(self) -> int:
        return sum(part.total for part in self.parts)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of one cache that pass along one route.

    Attributes:
        views: K and V of each layer in turn (or one latent each), `[page, head, token, dim]` of the
            heads that move, any strides; uint8 `[page, head, 1, bytes]` for `verbatim`. The memory
            is the engine's and is not copied.
        table: int64 `[block, 5]` on the device: address, and strides of page, head, token and dim
            in bytes.
        factors: float32 `[block]` on the device: see `step`.
        parts: blocks of a layer, 1 or 2.
        page_size: tokens of a page of the engine; a page of `views` may be a part of it.
        codec: `raw`, `fp8_e4m3`, `int8` or `verbatim`.
        source: what the producer's cache holds.
        destination: what the consumer's cache holds.
        step: how a value becomes what the destination stores: `times` its factor, where the source
            is FP8 (and both sides' scales are not the same), `over` it, where only the destination
            is, or `none`.
        wide: whether all rows may be read and written 16 bytes at a time.
    """

    views: tuple[torch.Tensor, ...]
    table: torch.Tensor
    factors: torch.Tensor
    parts: int
    page_size: int
    codec: str
    source: torch.dtype
    destination: torch.dtype
    step: str
    wide: bool

    @classmethod
    def of(
        cls,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        page_size: int,
        codec: str,
        source: Stored,
        destination: Stored,
        heads: range | None = None,
    ) -> "Blocks":
        """The blocks of some layers.

        Args:
            keys: K of each layer, or its latent: `[page, head, token, dim]`, any strides; all of
                one shape and one dtype, that of `source` in the producer and of `destination` in
                the consumer.
            values: V of each layer, of K's shape but for dim; empty for latents.
            page_size: tokens of a page of the engine, a multiple of the views' tokens.
            codec: as both sides agreed: `raw`, `fp8_e4m3` or `int8`.
            heads: which of the views' heads move; all by default.

        Raises:
            ValueError: views that do not belong together, pages more than 2 GiB apart, or a codec
                that cannot take `source`.
        """
        if codec not in CODECS or codec == "verbatim":
            raise ValueError(f"codec {codec!r}: must be one of {', '.join(CODECS[:3])}")
        for stored in (source, destination):
            if stored.dtype not in DTYPES:
                raise ValueError(f"cache of {stored.dtype}: must be one of {DTYPES}")
        if source.is_fp8 and codec != "raw":
            raise ValueError(f"{codec} of an FP8 cache: use raw, which is one byte an element too")
        if values and len(values) != len(keys):
            raise ValueError(f"K of {len(keys)} layers and V of {len(values)}: must be as many")
        parts = 2 if values else 1
        paired = zip(keys, values, strict=True) if values else ((key,) for key in keys)
        views = [view for layer in paired for view in layer]
        if heads is not None:
            views = [view[:, heads.start : heads.stop] for view in views]
        for view in views:
            _check(view, views[0], page_size, (source.dtype, destination.dtype))
        for name, scales in (("source", source.scales), ("destination", destination.scales)):
            if scales and len(scales) != len(views):
                raise ValueError(f"{len(scales)} scales of the {name}: wanted {len(views)}")
        factors = [_factor(source, destination, block) for block in range(len(views))]
        return cls.at(
            views,
            torch.tensor(factors, dtype=torch.float32, device=views[0].device),
            parts,
            page_size,
            codec,
            source.dtype,
            destination.dtype,
            _step(source, destination, len(views)),
        )

    @classmethod
    def of_rows(cls, rows: Sequence[torch.Tensor], parts_per_page: int) -> "Blocks":
        """Whole pages of some layers, as bytes.

        Args:
            rows: of each layer, uint8 `[page, head, bytes]` of the heads that move; head is 1 where
                a page is not apart by head.
            parts_per_page: pages of `rows` that are one page of the engine.

        Raises:
            ValueError: rows that are not of one shape.
        """
        views = [row.unsqueeze(2) for row in rows]
        for view in views:
            if view.shape[1:] != views[0].shape[1:] or view.dtype != torch.uint8:
                raise ValueError(f"rows {tuple(view.shape)} of {view.dtype}: must be alike, uint8")
        ones = torch.ones(len(views), device=views[0].device)
        bytes_of = torch.uint8, torch.uint8
        return cls.at(views, ones, 1, parts_per_page, "verbatim", *bytes_of, "none")

    @classmethod
    def at(
        cls,
        views: Sequence[torch.Tensor],
        factors: torch.Tensor,
        parts: int,
        page_size: int,
        codec: str,
        source: torch.dtype,
        destination: torch.dtype,
        step: str,
    ) -> "Blocks":
        """Blocks with these attributes, wherever the views lie.

        Raises:
            ValueError: pages more than 2 GiB apart.
        """
        table, wide = _table(views), _wide(views)
        kinds = codec, source, destination, step
        return cls(tuple(views), table, factors, parts, page_size, *kinds, wide)

    def stand_in(self) -> "Blocks":
        """One layer of one page of memory of its own, zero, which takes the same kernels as these: to
        compile them with a chunk of one token, before there are chunks."""
        views = [view.new_zeros((1, *view.shape[1:])) for view in self.views[: self.parts]]
        factors = self.factors[: self.parts]
        return replace(self, views=tuple(views), table=_table(views), factors=factors)

    @property
    def layers(self) -> int:
        return len(self.views) // self.parts

    @property
    def heads(self) -> int:
        return int(self.views[0].shape[1])

    @property
    def dims(self) -> tuple[int, ...]:
        """Of K, and of V where there is one."""
        return tuple(view.shape[3] for view in self.views[: self.parts])

    def extent(self, tokens: int) -> LayerBytes:
        """Sizes of a chunk of `tokens` tokens; `verbatim`, of so many pages of `views`."""
        return LayerBytes(
            tuple(
                block_bytes(self.codec, part == 0, self.heads, tokens, dim, self.source.itemsize)
                for part, dim in enumerate(self.dims)
            )
        )

    def nbytes(self, tokens: int) -> int:
        """Bytes of the payload of a chunk."""
        return self.layers * self.extent(tokens).layer_bytes

    @property
    def as_stored(self) -> bool:
        """Whether the wire has what the destination stores, bit by bit."""
        if self.codec == "fp8_e4m3":
            return bool(self.destination == torch.float8_e4m3fn)
        same = bool(self.source == self.destination) and self.step == "none"
        return self.codec == "verbatim" or (self.codec == "raw" and same)


def _step(source: Stored, destination: Stored, blocks: int) -> str:
    if source.is_fp8 and destination.is_fp8:
        same = all(source.scale(block) == destination.scale(block) for block in range(blocks))
        return "none" if same else "times"
    if source.is_fp8:
        return "times"
    return "over" if destination.is_fp8 else "none"


def _factor(source: Stored, destination: Stored, block: int) -> float:
    if source.is_fp8:
        return source.scale(block) / (destination.scale(block) if destination.is_fp8 else 1.0)
    return destination.scale(block) if destination.is_fp8 else 1.0


def _check(
    view: torch.Tensor, first: torch.Tensor, page_size: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    alike = view.ndim == 4 and view.shape[1:3] == first.shape[1:3] and view.dtype == first.dtype
    if not alike or view.device != first.device or page_size % view.shape[2]:
        raise ValueError(
            f"view {tuple(view.shape)} of {view.dtype} on {view.device}: wanted [page, head, token, "
            f"dim] like {tuple(first.shape)} of {first.dtype} on {first.device}, with tokens that "
            f"divide the page size {page_size}"
        )
    if view.dtype not in dtypes:
        raise ValueError(f"view of {view.dtype}: must be as one side's cache stores it, {dtypes}")


def _table(views: Sequence[torch.Tensor]) -> torch.Tensor:
    rows = [(view.data_ptr(), *_strides(view)) for view in views]
    farthest = max(max(page, token, dim) for _, page, _, token, dim in rows)
    if farthest >= 1 << 31:
        raise ValueError(f"stride of {farthest} bytes: of pages, tokens and dims, below 2 GiB")
    return torch.tensor(rows, dtype=torch.int64, device=views[0].device)


def _strides(view: torch.Tensor) -> list[int]:
    """In bytes; 0 where there is only one, whatever torch says."""
    size = view.element_size()
    return [
        stride * size if count > 1 else 0
        for stride, count in zip(view.stride(), view.shape, strict=True)
    ]


def _wide(views: Sequence[torch.Tensor]) -> bool:
    def whole(view: torch.Tensor) -> bool:
        *steps, dim = _strides(view)
        places = (view.data_ptr(), *steps)
        return dim == view.element_size() and all(at % SECTION_BYTES == 0 for at in places)

    return all(whole(view) for view in views)
