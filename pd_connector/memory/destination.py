# SPDX-License-Identifier: Apache-2.0
"""Where a payload that is still arriving belongs."""

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager


class Destination(abc.ABC):
    """Memory of one payload, for a transport that decrypts it while it arrives. Whoever wants the
    payload can take the memory back at any time.

    Attributes:
        nbytes: length of the payload.
    """

    nbytes: int

    @abc.abstractmethod
    def memory(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Memory of bytes [start, stop) of the payload, in order. It may be written within the `with`
        block, and not afterwards. Empty if the payload is not wanted any more."""
