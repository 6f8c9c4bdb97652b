# SPDX-License-Identifier: Apache-2.0
"""Super-pages of a plane: the tokens that share scales."""

from collections.abc import Iterator

import torch

from pd_connector.kv.coding import Shape
from pd_kernels.payload import SUPER_PAGE

_RUN_ELEMENTS = 1 << 18  # coded at once: a run's float32 temporary stays in a CPU's cache


def runs(shape: Shape) -> Iterator[tuple[int, int]]:
    """Token ranges of whole super-pages; the last range is the shorter super-page, if there is one.

    >>> list(runs((8, 300, 128)))
    [(0, 256), (256, 300)]
    """
    heads, tokens, dims = shape
    step = max(1, _RUN_ELEMENTS // (heads * dims * SUPER_PAGE)) * SUPER_PAGE
    whole = tokens - tokens % SUPER_PAGE
    for first in range(0, whole, step):
        yield first, min(first + step, whole)
    if whole < tokens:
        yield whole, tokens


def grouped(run: torch.Tensor) -> torch.Tensor:
    """A run `[head, token, dim]` as `[head, super-page, token, dim]`. A view."""
    return run.unflatten(1, (-1, min(SUPER_PAGE, run.shape[1])))


def scales_of(scales: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """The scales `[head, super-page, ...]` of the run from token `first` to `stop`. A view."""
    return scales[:, first // SUPER_PAGE : -(-stop // SUPER_PAGE)]
