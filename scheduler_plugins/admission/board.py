# SPDX-License-Identifier: Apache-2.0
"""The board: an engine core writes its load there, and the API servers of its machine read it.

Engine core side: `BoardWriter`, one per scheduler. API server side: `Board`. Between them lies one
small file, in a directory that only this user may enter. The engine waits for the write, so it is a single system call.
The file has a checksum: if a reader finds a half-written post, it reads again. Neither side ever waits for the other.
"""

from __future__ import annotations

import atexit
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from scheduler_plugins.admission.liveness import (
    hold,
    is_held,
    lives,
    pid_namespace,
    start_ticks,
    user_namespace,
)
from scheduler_plugins.admission.load import LoadReport
from scheduler_plugins.admission.post import ClassRecord, Posted, read_post, sealed

STALE_S = 2.0
"""Time after the expected end of its step at which a busy engine's post becomes stale."""
EVERY_S = 0.05
"""The shortest time between two posts of a busy engine."""


class BoardError(OSError):
    """The directory of the boards cannot be trusted, or cannot be made."""


class Board:
    """The reading side. If there is no file, it looks again at each read, because engines start late."""

    def __init__(self, instance_id: str, rank: int = 0, *, folder: Path | None = None) -> None:
        """A board whose file need not exist yet.

        Args:
            instance_id: `vllm_config.instance_id` of the API server.
            rank: data parallel rank of the engine.
            folder: where boards lie; the user's own directory by default.
        """
        self._instance = _plain(instance_id.removesuffix(f"_dp{rank}"))
        self._rank = rank
        self._folder = folder or default_folder()
        self._path: Path | None = None
        atexit.register(self.close)

    def read(self) -> LoadReport | None:
        """The engine's load; None if the engine has not posted, its process is gone, or the post is stale."""
        posted = self.posted()
        return posted.report if posted else None

    def posted(self) -> Posted | None:
        """The whole post, under the same conditions as `read`."""
        for path in (self._path,) if self._path else self._candidates():
            posted = read_post(path)
            if posted is not None:
                self._path = path
                return posted if _holds(posted) else None
        self._path = None
        return None

    def close(self) -> None:
        """Delete the post if its writer is gone. vLLM kills engine cores, which then cannot delete it themselves."""
        if self._path is not None:
            _clear_away(self._path)

    def _candidates(self) -> Iterator[Path]:
        """The engine's file, found by the instance id, otherwise by a common parent process.

        With several API servers, each makes its own configuration and instance id. They and the engine core are
        children of one process.
        """
        if not _is_private(self._folder):
            return  # the file belongs to another user, who can write anything into it
        yield from self._folder.glob(f"{self._instance}.*.dp{self._rank}")
        yield from self._folder.glob(f"*.{_parent()}.dp{self._rank}")


class BoardWriter:
    """The writing side."""

    def __init__(self, instance_id: str, rank: int = 0, *, folder: Path | None = None) -> None:
        """Make the directory, and delete posts whose writers are gone.

        Raises:
            BoardError: the directory belongs to another user, or other users may enter it.
        """
        folder = folder or default_folder()
        _make_private(folder)
        for path in folder.iterdir():
            _clear_away(path)
        instance = _plain(instance_id.removesuffix(f"_dp{rank}"))
        self.path = folder / f"{instance}.{_parent()}.dp{rank}"
        self._file: int | None = None
        self._pid = os.getpid()
        self._started = start_ticks(self._pid)
        self._next_s = 0.0
        self._idle = False

    def due(self, now_s: float, *, idle: bool) -> bool:
        """Whether to post now: the last post is old enough, or work begins or ends. A burst shorter than the interval
        must not leave old counts on the board."""
        return (not idle and now_s >= self._next_s) or idle is not self._idle

    def write(
        self,
        report: LoadReport,
        now_s: float,
        *,
        idle: bool,
        step_s: float = 0.0,
        classes: dict[str, ClassRecord] | None = None,
    ) -> None:
        """Replace the post. `now_s` is `time.monotonic()`.

        Raises:
            OSError: the file cannot be written; the old post stays, and becomes stale.
        """
        posted = Posted(
            pid=self._pid,
            namespace=pid_namespace(),
            started=self._started,
            written_s=now_s,
            idle=idle,
            step_s=step_s,
            report=report,
            classes=classes or {},
        )
        self._next_s, self._idle = now_s + EVERY_S, idle
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            hold(self._file)
        os.pwrite(self._file, sealed(posted), 0)

    def close(self) -> None:
        """Delete the post. Can be called twice. A fork of the engine deletes nothing."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        if os.getpid() == self._pid:
            self.path.unlink(missing_ok=True)


def default_folder() -> Path:
    """This user's directory for boards. It is in shared memory if the machine has that."""
    shared = Path("/dev/shm")
    root = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"pd-scheduler-{os.getuid()}{user_namespace()}"


def boards_of(vllm_config: Any) -> list[Board]:
    """The boards of all engine cores of this machine that an API server sends requests to.

    There is one board per data-parallel rank. With an external load balancer, each API server has its own ranks. Boards
    of ranks on other machines are on those machines, and are not found.
    """
    parallel = vllm_config.parallel_config
    first, count = 0, parallel.data_parallel_size
    if parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb:
        first, count = parallel.data_parallel_index, parallel.data_parallel_size_local
    return [Board(vllm_config.instance_id, first + n) for n in range(max(1, count))]


def _holds(posted: Posted) -> bool:
    age_s = time.monotonic() - posted.written_s
    fresh = posted.idle or age_s <= STALE_S + posted.step_s
    return fresh and lives(posted.pid, posted.namespace, posted.started) is not False


def _parent() -> str:
    """The parent of this process, with a name that differs between containers."""
    return f"{pid_namespace()}-{os.getppid()}"


def _plain(name: str) -> str:
    """A name that is safe as a part of a file's name."""
    return "".join(
        character if character.isalnum() or character in "-_" else "-" for character in name
    )


def _make_private(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        status = folder.lstat()
        raise BoardError(
            f"{folder}: must be a directory of mode 0700 that belongs to user {os.getuid()}; "
            f"found mode {stat.filemode(status.st_mode)} of user {status.st_uid}. Remove it"
        )


def _is_private(folder: Path) -> bool:
    """Whether it is a directory that only this user may enter; False if it does not exist."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return mine and not status.st_mode & 0o077


def _clear_away(path: Path) -> None:
    """Delete a post whose writer is certainly gone. The post of a living engine elsewhere always stays."""
    posted = read_post(path)
    if posted is None:
        return
    alive = lives(posted.pid, posted.namespace, posted.started)
    if alive is False or (alive is None and not is_held(path)):
        path.unlink(missing_ok=True)
