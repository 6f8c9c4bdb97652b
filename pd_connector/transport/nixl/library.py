# SPDX-License-Identifier: Apache-2.0
"""NIXL's library, imported so that the process ends cleanly on hosts with RDMA packages.

NIXL's wheel brings its own libnl-route. Some modules of its UCX (EFA's) also load the system's libibverbs, and with it
the system's libnl-route. Loaded that way, the system's copy finds the wheel's functions before its own: at start it
registers its traffic classes there, which are refused because the wheel's have the same names, and at exit it removes
from a list what never was in it. The process crashes then, after all its work (SIGSEGV in
`rtnl_tc_unregister`; seen with NIXL 1.5.1 beside Debian's libibverbs1 and ibverbs-providers).

A library that was loaded by itself finds its own functions first. So the system's copy is loaded before UCX starts.
"""

import contextlib
import ctypes
from typing import Any

_SYSTEM_LIBRARY = "libnl-route-3.so.200"
"""The name under which libibverbs asks for it; the wheel's copy has another."""


def import_nixl() -> Any:
    """NIXL's Python API (`nixl._api`). Raises ImportError if it is not installed."""
    with contextlib.suppress(OSError):  # a host without RDMA packages has none
        ctypes.CDLL(_SYSTEM_LIBRARY)  # its symbols are bound now, and seen by nobody else
    from nixl import _api

    return _api
