# SPDX-License-Identifier: Apache-2.0
"""One layer's cache, or its states, as the engine's door passes them, with a check against the geometry."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pd_connector.codec import DTYPES
from pd_connector.errors import UnsupportedGeometryError
from pd_connector.kv.geometry import STATE_BYTES, Geometry, Group
from pd_connector.pages.tiles import dims_of, is_tiled, tokens_of
from pd_connector.plan.sizes import token_bytes


class LayerPages(NamedTuple):
    """One layer's cache, viewed as K and V. A page of these views may be a part of the engine's page.

    Attributes:
        key: `[page, kv head, token, dim]`, any strides; the latent of MLA. If there is an entry for several tokens
            (`Group.state_tokens`), its third axis counts entries. On the host also tiled,
            `[page, kv head, token tile, token, dim tile, dim]`.
        value: the same for V; None for a latent.
        planes: the same memory as bytes, each `[page, kv head, bytes]`, or `[page, 1, bytes]` if heads do not
            lie apart. One plane if a page's K and V lie side by side, two if they lie apart, none if pages
            are not dense.
    """

    key: torch.Tensor
    value: torch.Tensor | None
    planes: tuple[torch.Tensor, ...]


class StatePages(NamedTuple):
    """One layer's states. A page holds the state of one request at one position.

    Attributes:
        sections: this rank's part of each section of the group, in the order of `Group.sections`:
            `[page, unit, row, dim]` of the section's dtype, any strides. A convolution that the engine keeps as
            `[page, row, dim]` (SD) or as `[page, dim, row]` (DS, and SGLang) has a view of each of its sections, and
            views may interleave in memory; nothing is copied. Views of `uint8` sections count bytes.
        scratch_rows: the last rows of each convolution, which only speculation writes. A prefill leaves in them what an
            earlier request wrote.
    """

    sections: tuple[torch.Tensor, ...]
    scratch_rows: int = 0


class StatePart(NamedTuple):
    """Consecutive channels or rows of a state's tensor that are divided among ranks independently of the others.

    Attributes:
        name: the section's name.
        units: number of units that this rank holds.
        dim: channels of a unit in a convolution; otherwise elements of a row.
        total: units of the whole model, if not `units` times the number of ranks.
    """

    name: str
    units: int
    dim: int
    total: int = 0

    def units_of(self, ranks: int) -> int:
        """Units of the whole model, of which each of `ranks` ranks holds a part."""
        return self.total or self.units * ranks


def convolution_views(
    convolution: torch.Tensor, parts: Sequence[StatePart], name: str
) -> list[torch.Tensor]:
    """Views of the parts of a convolution, `[..., unit, row, dim]` each.

    Args:
        convolution: `[..., channel, row]`, any strides.
        parts: its channels, in their order.
        name: for messages.

    Raises:
        UnsupportedGeometryError: it has another number of channels.
    """
    sizes = [part.units * part.dim for part in parts]
    if sum(sizes) != convolution.shape[-2]:
        raise UnsupportedGeometryError(
            f"{name} has {convolution.shape[-2]} channels: wanted {' + '.join(map(str, sizes))} "
            f"({', '.join(part.name for part in parts)})"
        )
    return [
        run.unflatten(-2, (part.units, part.dim)).transpose(-2, -1)
        for part, run in zip(parts, convolution.split(sizes, -2), strict=True)
    ]


def check_states(layer: int, pages: StatePages, geometry: Geometry, group: Group) -> None:
    """Raises UnsupportedGeometryError if a layer's states differ from the geometry."""
    if len(pages.sections) != len(group.sections):
        raise UnsupportedGeometryError(
            f"layer {layer} has views of {len(pages.sections)} sections of its state: wanted "
            f"{', '.join(section.name for section in group.sections)}"
        )
    for section, view in zip(group.sections, pages.sections, strict=True):
        units = len(geometry.shard.heads(section.units))
        expected = units, section.rows, section.dim
        good = view.ndim == 4 and tuple(view.shape[1:]) == expected
        if not good or view.element_size() != STATE_BYTES.get(section.dtype):
            raise UnsupportedGeometryError(
                f"{section.name} of layer {layer} has shape {tuple(view.shape)} and {view.dtype}: wanted "
                f"[page, {units} units, {section.rows} rows, {section.dim}] of {section.dtype}"
            )


def check_layer(layer: int, pages: LayerPages, geometry: Geometry, group: Group) -> None:
    """Raises UnsupportedGeometryError if a layer differs from the geometry."""
    heads = len(geometry.heads(group))
    has_dtype = group.dtype in DTYPES
    views = [(pages.key, group.key_dim)]
    if pages.value is not None:
        views.append((pages.value, group.value_dim))
    elif group.value_dim:
        raise UnsupportedGeometryError(f"cache of layer {layer} has no V of {group.value_dim} dims")
    for view, dim in views:
        good = view.ndim == 4 or (has_dtype and is_tiled(view) and view.device.type == "cpu")
        good = good and view.shape[1] == heads and group.page_entries % tokens_of(view) == 0
        if has_dtype:
            good = good and dims_of(view) == dim and view.dtype == DTYPES[group.dtype]
        if not good:
            raise UnsupportedGeometryError(
                f"cache of layer {layer} has shape {tuple(view.shape)} and {view.dtype}: wanted "
                f"[page, {heads} heads, tokens that divide {group.page_entries}, {dim}] of "
                f"{group.dtype}"
            )
    if not pages.planes:
        if group.layout or not has_dtype:
            raise UnsupportedGeometryError(
                f"cache of layer {layer} ({group.dtype}, layout {group.layout}) has pages that are "
                "not dense: such pages can be moved only if the dtype is known and the layout has no name"
            )
        return
    count, tokens = len(pages.key), tokens_of(pages.key)
    apart = heads if group.heads_apart else 1
    expected = count, apart, heads // apart * tokens * token_bytes(group)
    actual = {(*plane.shape[:2], sum(p.shape[2] for p in pages.planes)) for plane in pages.planes}
    if actual != {expected}:
        shapes = ", ".join(str(tuple(plane.shape)) for plane in pages.planes)
        raise UnsupportedGeometryError(
            f"cache of layer {layer} has planes of shape {shapes}: wanted {expected} together"
        )
