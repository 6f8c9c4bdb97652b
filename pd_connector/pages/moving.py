# SPDX-License-Identifier: Apache-2.0
"""A gather or scatter that a device has been given, and may still be at."""

from typing import NamedTuple

import torch

from pd_kernels.transfer import finish


class Moving(NamedTuple):
    """A gather or scatter that has been queued.

    Attributes:
        sums: of the payload, in host memory, once it is done.
        done: after all of it, on the device; None on CPU, where it is done already.
    """

    sums: torch.Tensor
    nbytes: int
    done: torch.cuda.Event | None

    def finish(self) -> bytes:
        """Wait until all of it is done; returns the payload's checksum."""
        if self.done is not None:
            self.done.synchronize()
        return finish(self.sums, self.nbytes)
