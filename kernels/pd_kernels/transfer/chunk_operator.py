# SPDX-License-Identifier: Apache-2.0
"""`gather_pages` and `scatter_pages` as operators of torch: checks, the choice of kernel or
reference, and a registration that `torch.compile` understands."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pd_kernels.transfer.chunk_launch import ChunkLaunch
from pd_kernels.transfer.planes import Planes

Run = Callable[[ChunkLaunch], None]


class ChunkOperator:
    """One operation on chunks, called with a `ChunkLaunch`.

    Args:
        name: the operator's name in `torch.ops.pd_kernels`.
        mutates: the arguments that the operation writes: `slot` or `views`, and `sums`.
        launch: runs the chunk with a kernel.
        reference: runs it in plain torch.
    """

    def __init__(self, name: str, mutates: Sequence[str], launch: Run, reference: Run) -> None:
        self._launch = launch
        self._reference = reference
        self.registered: Any = torch.library.custom_op(
            f"pd_kernels::{name}", self._rebuilt, mutates_args=mutates
        )
        self.registered.register_fake(lambda *_: None)

    def __call__(self, chunk: ChunkLaunch) -> None:
        """Run a chunk.

        Raises:
            ValueError: the chunk's arguments contradict each other.
        """
        if not torch.compiler.is_compiling():
            # This skips the dispatcher, which takes longer than most chunks if the list has 160
            # views.
            self._run(chunk)
            return
        planes = chunk.planes
        self.registered(
            list(planes.views),
            planes.factors,
            chunk.pages,
            chunk.slot,
            chunk.sums,
            planes.parts,
            planes.page_size,
            chunk.first_token,
            chunk.tokens,
            planes.codec,
            planes.source,
            planes.destination,
            planes.step,
        )

    def _run(self, chunk: ChunkLaunch) -> None:
        chunk.check()
        if chunk.fits_kernels:
            with torch.cuda.device(chunk.slot.device):
                self._launch(chunk)
        else:
            self._reference(chunk)

    def _rebuilt(
        self,
        views: list[torch.Tensor],
        factors: torch.Tensor,
        pages: torch.Tensor,
        slot: torch.Tensor,
        sums: torch.Tensor | None,
        parts: int,
        page_size: int,
        first_token: int,
        tokens: int,
        codec: str,
        source: torch.dtype,
        destination: torch.dtype,
        step: str,
    ) -> None:
        # A compiler may pass copies of the views. Kernels use the addresses in the table, so the
        # table is made from the views passed.
        planes = Planes.at(
            views,
            factors,
            parts=parts,
            page_size=page_size,
            codec=codec,
            source=source,
            destination=destination,
            step=step,
        )
        self._run(ChunkLaunch(planes, pages, slot, first_token, tokens, sums))
