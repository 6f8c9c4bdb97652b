# SPDX-License-Identifier: Apache-2.0
"""Bytes that have arrived encrypted, and are decrypted where they are wanted."""

import abc

from pd_connector.memory.pieces import Pieces

LEAST_PIECE_BYTES = 16 << 10
"""Smaller pieces are copied together, and encrypted or decrypted as a whole: each would cost a microsecond."""


class Sealed(abc.ABC):
    """A payload in a transport's memory, not decrypted yet; valid until that transport's next `poll`.

    Whoever wants it decrypts it straight into its place, which saves a copy.

    Attributes:
        nbytes: its length.
    """

    nbytes: int

    @abc.abstractmethod
    def open(self) -> memoryview:
        """Decrypt it where it lies; a later call returns the same bytes.

        Raises TransportError if these are not the bytes that the peer sealed.
        """

    @abc.abstractmethod
    def open_into(self, pieces: Pieces) -> None:
        """Decrypt it into memory of this process, which has `nbytes` bytes. Call it once.

        Raises TransportError as `open` does; what lies in `pieces` is undefined then, and must
        not be used.
        """
