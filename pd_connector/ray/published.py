# SPDX-License-Identifier: Apache-2.0
"""An engine's address. The scheduler's process writes it, and the replica's process reads it."""

import json
import os

from pd_connector.errors import PDConnectorError
from pd_connector.protocol.wire.params import ProducerAddress, parse_address


class NoAddressError(PDConnectorError):
    """The engine has started but has not published its address."""


class PublishedAddress:
    """A file in memory into which the engine writes its address (config key `address_file`).

    It has no name on any disk. It ends with the process that made it, however that process ends.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("pd_connector_address")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        """The path, for processes of the same user on this machine."""

    def read(self) -> ProducerAddress:
        """The address.

        Raises:
            NoAddressError: the engine has not written an address.
        """
        written = os.pread(self._file, os.fstat(self._file).st_size, 0)
        try:
            address = parse_address(json.loads(written))
        except ValueError:
            address = None
        if address is None:
            raise NoAddressError(
                f"the engine wrote {written[:80]!r}: wanted its address, which PDConnector writes "
                "when the engine starts. Is kv_connector PDConnector, of the same version as Ray's "
                "side?"
            )
        return address
