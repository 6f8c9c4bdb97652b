# SPDX-License-Identifier: Apache-2.0
"""A process without free descriptors."""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_descriptors(but: int = 0) -> Iterator[None]:
    """Within, this process can open `but` more descriptors."""
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
