# SPDX-License-Identifier: Apache-2.0
"""The seam between a carrier and a store of several hosts.

A far store keeps whole objects under opaque names. It promises neither time, nor order, nor keeping: it may lose, alter or invent
objects, and strangers can write into it. So every object is sealed before it is put, and opened after it was read
(`seal.py`). Calls may block: they are made in a process of their own, which is killed at its deadline
(`pool/carrier/client.py`).

Another package adds a store by an entry point of the group `pd_connector.far_stores`: its name is the scheme of the address, its
object a subclass of `FarStore`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar
from urllib.parse import SplitResult

FAR_STORE_GROUP = "pd_connector.far_stores"
NAME_BYTES = 64
"""Characters of a name: `0` to `9` and `a` to `f`."""


class FarStore(ABC):
    """A client of a far store. One thread calls it."""

    package: ClassVar[str]
    """What to install for it, for errors."""
    most_bytes: ClassVar[int] = 1 << 30
    """Bytes of the largest object that it takes."""

    @classmethod
    @abstractmethod
    def problem(cls, address: SplitResult) -> str:
        """The error in an address, with advice; empty if there is none. Opens no connection."""

    @classmethod
    @abstractmethod
    def hosts(cls, address: SplitResult) -> list[str]:
        """The hosts that the client dials. Without a key all must be this machine's loopback."""

    @abstractmethod
    def __init__(self, address: SplitResult, deadline_s: float) -> None:
        """Open the client.

        Args:
            address: a valid address (`problem` returned an empty text).
            deadline_s: the longest wait for one answer of the store, if its client has such a setting.

        Raises:
            Exception: the store cannot be reached. The text is shown to people.
        """

    @abstractmethod
    def has(self, names: Sequence[str]) -> list[int]:
        """The bytes of each object; 0 if it is not there. Raises Exception if the store does not answer."""

    @abstractmethod
    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        """Read objects.

        Args:
            buffers: one for each object, with the length that `has` returned.

        Returns:
            The bytes that were written to each buffer; 0 if the object is not there, or is longer than its buffer.

        Raises:
            Exception: the store does not answer.
        """

    @abstractmethod
    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        """Store objects, in this order. Returns for each object whether it was stored. An existing object need not be
        replaced.

        Raises:
            Exception: the store does not answer.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are passed over. Raises Exception if the store does not answer."""

    @abstractmethod
    def close(self) -> None:
        """Close the client."""
