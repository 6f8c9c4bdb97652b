# SPDX-License-Identifier: Apache-2.0
"""The layers and heads of a cache that move, and their codec. Made once per cache, route and layer
range."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from pd_kernels.payload import CODEC_NAMES, SECTION_BYTES, PlaneBytes, plane_bytes

_MAX_STRIDE_BYTES = 1 << 31
"""Kernels hold the strides of page, token and dim in 32 bits."""


def view_table(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Addresses and strides for kernels: int64 `[view, 5]` on the views' device, strides in bytes.

    Raises:
        ValueError: strides of page, token or dim exceed 32 bits, which kernels use.
    """
    rows = [(view.data_ptr(), *_strides(view)) for view in views]
    for view, (_, page, _, token, dim) in zip(views, rows, strict=True):
        # Kernels multiply the index within a row by the stride of dim in 32 bits.
        farthest = max(page, token, dim * (view.shape[3] - 1))
        if farthest >= _MAX_STRIDE_BYTES:
            raise ValueError(
                f"view {tuple(view.shape)}, strides of {page}, {token} and {dim} bytes of page, token "
                "and dim: pages, tokens, and the elements of a token must be less than 2 GiB apart"
            )
    return torch.tensor(rows, dtype=torch.int64, device=views[0].device)


def _strides(view: torch.Tensor) -> list[int]:
    """Strides in bytes. 0 for an axis of length 1, whose stride in torch may be anything."""
    size = view.element_size()
    return [
        stride * size if count > 1 else 0
        for stride, count in zip(view.stride(), view.shape, strict=True)
    ]


def all_wide(views: Sequence[torch.Tensor]) -> bool:
    """Whether rows of all views, `[page, head, token, dim]`, can be read and written 16 bytes at a
    time."""

    def whole(view: torch.Tensor) -> bool:
        *steps, dim = _strides(view)
        places = (view.data_ptr(), *steps)
        return dim == view.element_size() and all(at % SECTION_BYTES == 0 for at in places)

    return all(whole(view) for view in views)


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)

MAX_LAYERS = 65_535
"""CUDA's limit for the third extent of a launch."""


class Stored(NamedTuple):
    """How a cache stores elements: value = stored * scale.

    Attributes:
        dtype: one of `DTYPES`.
        scales: one scale per plane, for FP8 caches; empty if all are 1.
    """

    dtype: torch.dtype
    scales: tuple[float, ...] = ()

    @property
    def is_fp8(self) -> bool:
        return bool(self.dtype == torch.float8_e4m3fn)

    def scale(self, plane: int) -> float:
        return self.scales[plane] if self.scales else 1.0


class PlaneSizes(NamedTuple):
    """Bytes of the planes of one layer in a payload: K (or the latent), then V if there is one."""

    parts: tuple[PlaneBytes, ...]

    @property
    def total(self) -> int:
        return sum(part.total for part in self.parts)


@dataclass(frozen=True, eq=False)
class Planes:
    """The planes of one cache that pass along one route. A plane is K or V of one layer.
    `Planes.of` makes it.

    Attributes:
        views: K and V of each layer in turn (or one latent each), `[page, head, token, dim]` with
            the heads that move and any strides. For `verbatim`, uint8 `[page, head, 1, bytes]`. The
            memory belongs to the engine and is not copied.
        table: int64 `[plane, 5]` on the device: the address, and the strides of page, head, token
            and dim in bytes.
        factors: float32 `[plane]` on the device, see `step`.
        parts: planes of a layer: 1 for latents and `verbatim`, otherwise 2.
        page_size: tokens of a page of the engine. A page of `views` may be a part of it.
        codec: `raw`, `fp8_e4m3`, `int8` or `verbatim`.
        source: dtype of the producer's cache.
        destination: dtype of the consumer's cache.
        step: how a decoded value is converted for the destination. `times`: multiply the value by
            the plane's factor (the source is FP8, and the two sides' scales differ). `over`: divide
            the value by the factor (only the destination is FP8). `none`: store the value
            unchanged.
        wide: whether all addresses and strides allow 16-byte accesses.
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
    ) -> "Planes":
        """Describe the planes of some layers. This copies a small table to the device, and touches
        no KV.

        Args:
            keys: K of each layer, or its latent: `[page, head, token, dim]`, any strides, all of
                one shape and dtype. The dtype is `source`'s in the producer and `destination`'s in
                the consumer.
            values: V of each layer, shaped like K except for dim; empty for latents.
            page_size: tokens of a page of the engine, a multiple of the tokens of the views.
            codec: `raw`, `fp8_e4m3` or `int8`; both sides pass the same codec.
            source: how the producer's cache stores elements.
            destination: how the consumer's cache stores them.
            heads: the heads of the views that move; all by default.

        Raises:
            ValueError: views contradict each other, elements of a page are more than 2 GiB apart,
                or the codec does not support `source`.

        Example:
            Two layers of 3 KV heads; only heads 1 and 2 move.

            >>> import torch
            >>> from pd_kernels.transfer import Planes, Stored
            >>> keys, values = torch.zeros(2, 2, 6, 3, 16, 32).bfloat16()  # layer, page, head, token, dim
            >>> bf16 = Stored(torch.bfloat16)
            >>> planes = Planes.of(keys, values, 16, "int8", bf16, bf16, heads=range(1, 3))
            >>> planes.layers, planes.heads, planes.dims
            (2, 2, (32, 32))
            >>> planes.nbytes(tokens=100)
            26656
        """
        if codec not in CODEC_NAMES:
            raise ValueError(f"codec {codec!r}: must be one of {', '.join(CODEC_NAMES)}")
        for stored in (source, destination):
            if stored.dtype not in DTYPES:
                raise ValueError(f"cache of {stored.dtype}: must be one of {DTYPES}")
        if source.is_fp8 and codec != "raw":
            raise ValueError(f"{codec} of an FP8 cache: use raw, which is one byte an element too")
        views, parts = _interleaved(keys, values, heads)
        for number, view in enumerate(views):
            dim = views[number % parts].shape[-1]
            _check(view, views[0], dim, page_size, (source.dtype, destination.dtype))
        for name, scales in (("source", source.scales), ("destination", destination.scales)):
            if scales and len(scales) != len(views):
                raise ValueError(f"{len(scales)} scales of the {name}: wanted {len(views)}")
        factors = [_factor(source, destination, plane) for plane in range(len(views))]
        return cls.at(
            views,
            torch.tensor(factors, dtype=torch.float32, device=views[0].device),
            parts=parts,
            page_size=page_size,
            codec=codec,
            source=source.dtype,
            destination=destination.dtype,
            step=_step(source, destination, len(views)),
        )

    @classmethod
    def of_rows(cls, rows: Sequence[torch.Tensor], parts_per_page: int) -> "Planes":
        """Describe whole pages of some layers that pass as bytes (`verbatim`).

        Args:
            rows: one per layer, or per plane of a layer, uint8 `[page, head, bytes]` with the heads
                that move. head is 1 if the heads of a page cannot be separated.
            parts_per_page: pages of `rows` per page of the engine.

        Raises:
            ValueError: the rows are not uint8 of one shape.

        Example:
            >>> import torch
            >>> from pd_kernels.transfer import Planes
            >>> pages = Planes.of_rows([torch.zeros(6, 8, 1024, dtype=torch.uint8)] * 2, parts_per_page=1)
            >>> pages.nbytes(tokens=3)  # 2 layers, 3 pages, 8 heads of 1024 bytes
            49152
        """
        views = [row.unsqueeze(2) for row in rows]
        for view in views:
            if view.shape[1:] != views[0].shape[1:] or view.dtype != torch.uint8:
                raise ValueError(
                    f"rows {tuple(view.shape)} of {view.dtype}: all rows must have the same shape and dtype uint8"
                )
        return cls.at(
            views,
            torch.ones(len(views), device=views[0].device),
            parts=1,
            page_size=parts_per_page,
            codec="verbatim",
            source=torch.uint8,
            destination=torch.uint8,
            step="none",
        )

    @classmethod
    def at(
        cls,
        views: Sequence[torch.Tensor],
        factors: torch.Tensor,
        *,
        parts: int,
        page_size: int,
        codec: str,
        source: torch.dtype,
        destination: torch.dtype,
        step: str,
    ) -> "Planes":
        """Make planes with these attributes, and make their table from the addresses of the views.

        Raises:
            ValueError: elements of a page are more than 2 GiB apart.
        """
        return cls(
            views=tuple(views),
            table=view_table(views),
            factors=factors,
            parts=parts,
            page_size=page_size,
            codec=codec,
            source=source,
            destination=destination,
            step=step,
            wide=all_wide(views),
        )

    def stand_in(self) -> "Planes":
        """Make planes of one layer and one page of zeros, in separate memory, that use the same
        kernels.

        Moving one token of these planes compiles the kernels before real chunks come.
        """
        views = [view.new_zeros((1, *view.shape[1:])) for view in self.views[: self.parts]]
        factors = self.factors[: self.parts]
        return replace(self, views=tuple(views), table=view_table(views), factors=factors)

    @property
    def layers(self) -> int:
        return len(self.views) // self.parts

    @property
    def heads(self) -> int:
        return int(self.views[0].shape[1])

    @property
    def dims(self) -> tuple[int, ...]:
        """Elements of one token of one head: for K, and for V if there is one."""
        return tuple(view.shape[3] for view in self.views[: self.parts])

    def sizes(self, tokens: int) -> PlaneSizes:
        """Sizes of a layer's planes in a chunk of `tokens` tokens. For `verbatim`, `tokens` counts
        pages."""
        return PlaneSizes(
            tuple(
                plane_bytes(self.codec, part == 0, self.heads, tokens, dim, self.source.itemsize)
                for part, dim in enumerate(self.dims)
            )
        )

    def nbytes(self, tokens: int) -> int:
        """Bytes of the payload of a chunk of `tokens` tokens. For `verbatim`, `tokens` counts pages
        of `views`."""
        return self.layers * self.sizes(tokens).total

    @property
    def as_stored(self) -> bool:
        """Whether the destination stores the payload's codes bit by bit."""
        if self.codec == "fp8_e4m3":
            return bool(self.destination == torch.float8_e4m3fn)
        same = bool(self.source == self.destination) and self.step == "none"
        return self.codec == "verbatim" or (self.codec == "raw" and same)


def _interleaved(
    keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], heads: range | None
) -> tuple[list[torch.Tensor], int]:
    """K and V of each layer in turn, with only `heads`; and the number of planes per layer."""
    if len(values) and len(values) != len(keys):
        raise ValueError(f"K of {len(keys)} layers and V of {len(values)}: must be the same number")
    paired = zip(keys, values, strict=True) if len(values) else ((key,) for key in keys)
    views = [view for layer in paired for view in layer]
    if heads is not None:
        views = [view[:, heads.start : heads.stop] for view in views]
    return views, 2 if len(values) else 1


def _step(source: Stored, destination: Stored, planes: int) -> str:
    if source.is_fp8 and destination.is_fp8:
        same = all(source.scale(plane) == destination.scale(plane) for plane in range(planes))
        return "none" if same else "times"
    if source.is_fp8:
        return "times"
    return "over" if destination.is_fp8 else "none"


def _factor(source: Stored, destination: Stored, plane: int) -> float:
    if source.is_fp8:
        return source.scale(plane) / (destination.scale(plane) if destination.is_fp8 else 1.0)
    return destination.scale(plane) if destination.is_fp8 else 1.0


def _check(
    view: torch.Tensor,
    first: torch.Tensor,
    dim: int,
    page_size: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    alike = view.ndim == 4 and view.shape[1:3] == first.shape[1:3] and view.dtype == first.dtype
    alike = alike and view.shape[3] == dim
    if not alike or view.device != first.device or page_size % view.shape[2]:
        raise ValueError(
            f"view {tuple(view.shape)} of {view.dtype} on {view.device}: wanted [page, head, token, "
            f"dim] like {tuple(first.shape)} of {first.dtype} on {first.device}, dim {dim}, with "
            f"tokens that divide the page size {page_size}"
        )
    if view.dtype not in dtypes:
        raise ValueError(f"view of {view.dtype}: must be as one side's cache stores it, {dtypes}")
