# SPDX-License-Identifier: Apache-2.0
"""NIXL's library, imported so that processes end cleanly on hosts with RDMA packages.

NIXL's wheel brings its own libnl-route, under another file name. A module of its UCX (EFA's) loads the system's libefa,
which loads the system's libnl-route. Loaded this way, the system's libnl-route resolves its functions in the wheel's
copy first. So it calls the wheel's `rtnl_tc_register`, which refuses its traffic classes, because the wheel's have the
same names. At the process's end it calls `rtnl_tc_unregister`, which removes an entry that never was in the list. The
process crashes there, after all its work (SIGSEGV; seen with NIXL 1.5.1 beside Debian's libibverbs1, librdmacm1 and
ibverbs-providers).

A library that is loaded by itself finds its own functions first. So the system's libnl-route is loaded before UCX
starts. The other libraries are left to UCX: libefa must find the wheel's libibverbs, or EFA devices are not seen.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable
from typing import Any, TypeVar

_SYSTEM_LIBRARY = "libnl-route-3.so.200"
"""The name under which libibverbs asks for it; the wheel's copy has another."""

Made = TypeVar("Made")

_ATTEMPTS = 5
_PAUSE_S = 0.05
"""Before the second attempt, twice that before the third, and so on: 0.5 s in all."""


def import_nixl() -> Any:
    """NIXL's Python API (`nixl._api`). Raises ImportError if it is not installed."""
    with contextlib.suppress(OSError):  # a host without RDMA packages has none
        ctypes.CDLL(_SYSTEM_LIBRARY)  # its symbols are bound now, and no other library sees them
    from nixl import _api

    return _api


def persistently(make: Callable[[], Made]) -> Made:
    """Call `make`, which opens NIXL's backend UCX, and call it again if it fails.

    UCX looks at every network interface of the host, and fails if an interface is removed meanwhile. Interfaces of
    containers come and go beside an engine. Where interfaces came and went every 30 ms, 17 of 40 calls failed.

    Raises what `make` raised last.
    """
    for attempt in range(1, _ATTEMPTS):
        with contextlib.suppress(Exception):
            return make()
        time.sleep(attempt * _PAUSE_S)
    return make()
