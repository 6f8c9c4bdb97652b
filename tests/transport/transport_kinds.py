# SPDX-License-Identifier: Apache-2.0
"""The kinds of transport that tests run over; those whose package is missing are skipped."""

import pytest

from pd_connector.errors import TransportError
from pd_connector.memory.slab import Slab
from pd_connector.transport.base import Transport


def _missing(make: str) -> str:
    """Why a transport cannot be made here, empty if it can."""
    try:
        _make(make).close()
    except TransportError as error:
        return str(error)
    return ""


def _make(name: str) -> Transport:
    if name == "nixl":
        from pd_connector.transport.nixl.transport import NixlTransport

        return NixlTransport(Slab(1, 4096), Slab(1, 4096))
    from pd_connector.transport.ucx import UcxTransport

    return UcxTransport(4096)


def _optional(name: str) -> object:
    reason = _missing(name)
    return pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=reason))


NIXL = _optional("nixl")
UCX = _optional("ucx")
KINDS = ["shm", "tcp", "tcp+key", NIXL, UCX]
READABLE_KINDS = ["shm", NIXL]
