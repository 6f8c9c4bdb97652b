# SPDX-License-Identifier: Apache-2.0
"""A process without free descriptors."""

import contextlib
import os
import resource
import time
from collections.abc import Iterator

_QUIET_S = 0.1


@contextlib.contextmanager
def no_descriptors(but: int = 0) -> Iterator[None]:
    """Within, this process can open `but` more descriptors."""
    _wait_for_other_threads()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
    hoard: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(but):
            os.close(hoard.pop())
        yield
    finally:
        for descriptor in hoard:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _wait_for_other_threads() -> None:
    """A library's thread may still close what an earlier test gave up (libzmq's does, after
    `close` has returned). Each such descriptor would be free within."""
    seen, since = _open(), time.monotonic()
    while time.monotonic() - since < _QUIET_S:
        time.sleep(0.005)
        if (now := _open()) != seen:
            seen, since = now, time.monotonic()


def _open() -> set[str]:
    return set(os.listdir("/proc/self/fd"))
