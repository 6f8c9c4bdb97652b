# SPDX-License-Identifier: Apache-2.0
"""A gather or scatter that is queued on a device, and may still run."""

from typing import NamedTuple

import torch

from pd_kernels.transfer import finish


class Moving(NamedTuple):
    """A gather or scatter that has been queued.

    Attributes:
        sums: of the payload, in host memory, once the work is done.
        done: event after the whole work, on the device; None on a CPU, where the work is already done.
    """

    sums: torch.Tensor
    nbytes: int
    done: torch.cuda.Event | None

    def finish(self) -> bytes:
        """Wait until the work is done; returns the payload's checksum."""
        if self.done is not None:
            self.done.synchronize()
        return finish(self.sums, self.nbytes)
