# SPDX-License-Identifier: Apache-2.0
"""A process that forks children, each of which does one thing to a store and is hit by a signal at a given line.

Lines of standard input: action, name of the signal, number of the line that the child reaches within the store's code. Answers:
`stopped PID` if the child has stopped itself, then `ended` with its exit status, or `killed`.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from chunks import chain, content, save

from pd_connector.errors import PoolError
from pd_connector.pool.store import base
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.catalog import CatalogError
from pd_connector.pool.store.folder import charge_of
from pd_connector.pool.store.local import LocalStore, Space

NBYTES = 10_000
CHARGE = charge_of(NBYTES)
ROOM = 4
"""Chunks that fit into memory. The pool is full when a child begins."""
OLD, NEW, ALIEN = chain("old", ROOM), chain("new", 2), chain("alien", 2)
_STORE = str(Path(base.__file__).parent)


def opened(folder: Path) -> LocalStore:
    return LocalStore(
        Space(folder / "pool", ROOM * CHARGE), Space(folder / "disk", 4 * ROOM * CHARGE)
    )


def act(store: LocalStore, action: str) -> None:
    """One thing that a process does."""
    if action == "save":
        save(store, NEW)
    elif action == "save parts":
        for part in ("tp0", "tp1"):
            save(store, NEW[:1], part=part, parts=2, writer="engine")
    elif action == "load":
        store.find(OLD)
        store.pin(OLD, for_s=60)
        for key in OLD:
            with contextlib.suppress(PoolError), store.read(key, "r0") as reading:
                assert reading.take(0, NBYTES) == content(key, "r0", NBYTES)
        store.unpin(OLD)
    elif action == "remove":
        store.remove(OLD[-1:])
    elif action == "copy":
        with contextlib.suppress(CatalogError):  # as the keeper's thread does: it tries again
            store.maintenance.copy(OLD[0], 1)
            store.maintenance.copy(OLD[0], 0)
    elif action == "cancel":
        writing = store.begin(NEW[0], parent=b"", part="r0", parts=1, nbytes=NBYTES)
        if not isinstance(writing, Refusal):
            writing.cancel()
    elif action == "sweep":
        with contextlib.suppress(CatalogError):
            store.maintenance.sweep()
    else:
        assert action == "rebuild the catalog"
        with contextlib.suppress(CatalogError):
            store.maintenance.rebuild_catalog("a test wants it")


def child(folder: Path, action: str, number: int, line: int) -> None:
    """Act, and be hit at the given line."""
    store = opened(folder)
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(_STORE):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                os.kill(os.getpid(), number)
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    act(store, action)
    sys.settrace(None)
    store.close()


def main(folder: Path) -> None:
    for command in sys.stdin:
        action, name, line = command.strip().split("|")
        pid = os.fork()
        if not pid:
            child(folder, action, getattr(signal, name), int(line))
            os._exit(0)
        _, status = os.waitpid(pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            print("stopped", pid, flush=True)
            _, status = os.waitpid(pid, 0)
        print("ended", "killed" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
