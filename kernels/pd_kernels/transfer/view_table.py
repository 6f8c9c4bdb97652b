# SPDX-License-Identifier: Apache-2.0
"""Addresses and strides of a cache's views, as a table that kernels read."""

from collections.abc import Sequence

import torch

from pd_kernels.payload import SECTION_BYTES

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
