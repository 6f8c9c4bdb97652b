# SPDX-License-Identifier: Apache-2.0
"""The memory into which an arriving payload goes."""

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager


class Destination(abc.ABC):
    """Memory of one payload, for a transport that decrypts it while it arrives. The receiver of the payload can
    take the memory back at any time.

    Attributes:
        nbytes: length of the payload.
    """

    nbytes: int

    @abc.abstractmethod
    def memory(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Memory of bytes [start, stop) of the payload, in order. It may be written only within the `with` block.
        Empty if the receiver has taken the memory back."""
