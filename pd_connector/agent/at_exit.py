# SPDX-License-Identifier: Apache-2.0
"""Closes agents that are still open when the interpreter ends. A thread that is still in a library then may crash it."""

import atexit
import os
import weakref
from typing import Protocol


class Closable(Protocol):
    """What can be closed, more than once."""

    def close(self) -> None: ...


_open: "weakref.WeakKeyDictionary[Closable, int]" = weakref.WeakKeyDictionary()
"""What is to be closed, with the id of the process that made it. A process that is forked later does not
have its thread."""


def close_at_exit(made: Closable) -> None:
    """Close this when the interpreter ends."""
    _open[made] = os.getpid()


@atexit.register
def _close_all() -> None:
    for made, process in list(_open.items()):
        if process == os.getpid():
            made.close()
