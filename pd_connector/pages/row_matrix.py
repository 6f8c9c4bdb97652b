# SPDX-License-Identifier: Apache-2.0
"""A cache on the host, viewed as one matrix of rows; numpy moves any set of rows in one call.

`np.take` copies row by row without an intermediate buffer, for rows of any size. That is two to three times
as fast as assignments page by page if pages are small, and faster if they are not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pd_connector.pages.spans import Index

Words = npt.NDArray[Any]

_WORD = 8


class RowMatrix(NamedTuple):
    """The memory of a view as rows that lie side by side; some rows may not belong to the view.

    Attributes:
        rows: `[rows, bytes]`, or `[rows, words of 8 bytes]` if size and address allow that.
        steps: rows from one element to the next, for each leading axis of the view.
    """

    rows: Words
    steps: tuple[int, ...]

    @classmethod
    def of(cls, view: torch.Tensor) -> RowMatrix | None:
        """The matrix of a view `[..., row]`; None if the distances between its rows are not whole rows.

        Args:
            view: on the host; at least two axes.
        """
        if view.stride(-1) != 1 or not view.numel():
            return None
        cells = view.view(torch.uint8).numpy()
        row, steps = cells.shape[-1], cells.strides[:-1]
        if any(step % row for step in steps):
            return None
        reach = sum((n - 1) * step for n, step in zip(cells.shape, steps, strict=False))
        rows = np.lib.stride_tricks.as_strided(cells, (reach // row + 1, row), (row, 1))
        if row % _WORD == 0 and cells.ctypes.data % _WORD == 0:
            rows = rows.view(np.int64)
        return cls(rows, tuple(step // row for step in steps))

    def take(self, index: Index, out: Words) -> None:
        """Copy these rows into dense bytes. The index is not checked: it must be within the matrix."""
        source, target = self._alike(len(index), out)
        np.take(source, index, axis=0, out=target, mode="clip")

    def put(self, index: Index, values: Words) -> None:
        """Write dense bytes into these rows; no row may be named twice."""
        target, source = self._alike(len(index), values)
        target[index] = source

    def _alike(self, count: int, dense: Words) -> tuple[Words, Words]:
        """The matrix and `count` dense rows, as views in words that fit both."""
        rows, cells = self.rows, dense.reshape(-1).view(np.uint8).reshape(count, -1)
        if cells.ctypes.data % _WORD:
            return rows.view(np.uint8), cells
        return rows, cells.view(rows.dtype)
