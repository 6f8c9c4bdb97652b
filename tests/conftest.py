# SPDX-License-Identifier: Apache-2.0
"""Property tests have no time limit: a busy machine is not a failure. They try the same examples each
time, so that a run can be repeated; with PD_RANDOM_TESTS=1 in the environment, others each time.

Signals mean what they usually mean, in children too: a test run that was started in the background,
or with nohup, has inherited some as ignored.

Loggers may be made while pytest walks through all of them.

UCX uses loopback alone. An agent of NIXL names every interface of its host to its peers, and a peer cannot meet it once
one of them has gone: other tests, and containers of the machine, make and remove interfaces meanwhile.

Python's collector of garbage passes over what imports have made: a million objects that stay, half a second each time. It
does so in children that are forked, too.
"""

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile(
    "pd_connector",
    deadline=None,
    print_blob=True,
    derandomize=not os.environ.get("PD_RANDOM_TESTS"),
)
settings.load_profile("pd_connector")

os.environ.setdefault("UCX_NET_DEVICES", "lo")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


class _Loggers(dict[str, logging.Logger | logging.PlaceHolder]):
    """Walked through as a copy. pytest does so before each phase of a test, without logging's lock, and a thread of ours
    that imports numba for a codec's loops adds loggers meanwhile: "dictionary changed size during iteration"."""

    def values(self) -> Any:
        return self.copy().values()


logging.root.manager.loggerDict = _Loggers(logging.root.manager.loggerDict)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Nothing is collected as garbage while tests are imported, and what is there then stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else Triton's library counts what has not been freed


@pytest.fixture
def compiled_kernels() -> None:
    """Skips a test that launches kernels on a GPU in a process whose kernels are interpreted."""
    copy_kernel = sys.modules.get("pd_kernels.transfer.copy_kernel")
    if copy_kernel is not None and type(copy_kernel.copy_pages).__name__ == "InterpretedFunction":
        pytest.skip(
            "tests/kernels runs in this process, with Triton's interpreter: run this file alone"
        )
