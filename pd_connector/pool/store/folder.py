# SPDX-License-Identifier: Apache-2.0
"""The folder of a tier. Every operation is one step of the file system, so nothing is ever half done.

    index/KEY        a symbolic link, the entry of a whole chunk (`entry.py`)
    data/FILE        a part that is whole
    staged/FILE      a part that is being written

A chunk is there if its entry is. Files that no entry names are garbage, or parts that wait for the others. Names are opened
below descriptors of these folders, links are never followed, and a file counts only if it is this user's alone.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from pd_connector.errors import ConfigError, Miss, PoolError
from pd_connector.pool.store.base import MEMORY
from pd_connector.pool.store.entry import LINK, Entry, entry_of, file_name

VERSION = "v1"
"""The version of this layout. A folder may hold several."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OTHERS = 0o077
PAGE = 4096
RESERVE_BYTES = 512 << 10
"""Room of the file system that parts leave to the catalog: without it nothing could be evicted."""
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say what the process or the machine lacks at the moment, and nothing about the file."""


def charge_of(nbytes: int) -> int:
    """Bytes of a budget that a part uses: its blocks, and one more for its names and its row in the catalog."""
    return -(-nbytes // PAGE) * PAGE + PAGE


def unreadable(name: str, error: OSError) -> PoolError:
    """The error for a part that cannot be opened or read: REFUSED if another attempt can succeed, otherwise DAMAGED."""
    cause = Miss.REFUSED if error.errno in PASSING else Miss.DAMAGED
    return PoolError(cause, f"{name}: {error.strerror}")


def _setting(key: str) -> str:
    return f"variable {key}" if key.isupper() else f"config key {key}"


def unusable(path: Path, error: OSError, key: str) -> ConfigError:
    """The error for a folder in which files cannot be made."""
    return ConfigError(
        f"{path}: {error.strerror}: name a folder in which this user can make files ({_setting(key)})"
    )


def private_folder(path: Path, key: str) -> int:
    """A descriptor of a folder that is this user's alone; makes the folder if its parent is there.

    Args:
        key: key of the config, for the error.

    Raises:
        ConfigError: it cannot be made, is a link, or others own or may enter it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        descriptor = os.open(path, _FOLDER)
    except NotADirectoryError:
        what = "a symbolic link: name the folder itself" if path.is_symlink() else "not a folder"
        raise ConfigError(f"{path}: is {what} ({_setting(key)})") from None
    except FileNotFoundError:
        if path.parent.is_dir():
            raise ConfigError(
                f"{path}: no folder can be made in {path.parent} (its file system keeps no files): name a folder of a "
                f"disk ({_setting(key)})"
            ) from None
        raise ConfigError(
            f"{path}: there is no folder {path.parent}: create it, or mount it ({_setting(key)})"
        ) from None
    except OSError as error:
        raise unusable(path, error, key) from error
    status = os.fstat(descriptor)
    problem = ""
    if status.st_uid != os.geteuid():
        problem = (
            f"belongs to user {status.st_uid}, not to {os.geteuid()}: name a folder of this user"
        )
    elif status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        shared = mode & stat.S_ISVTX  # such as /tmp, which must stay open
        remedy = f"name a folder within it, such as {path}/kv, which the engine makes"
        remedy += "" if shared else f", or chmod 700 {path} if nobody else needs it"
        problem = f"is open to other users (mode {mode:o}): KV could be read in it; {remedy}"
    if problem:
        os.close(descriptor)
        raise ConfigError(f"{path}: {problem} ({_setting(key)})")
    return descriptor


def _mount_point(path: Path) -> Path:
    """Where the file system of this path is mounted."""
    path = path.resolve()
    return next(each for each in (path, *path.parents) if os.path.ismount(each))


@contextlib.contextmanager
def reopened(folder: int) -> Iterator[int]:
    """A descriptor of the same folder with a position of its own. Threads that list one descriptor at the same time move each
    other's position, and miss names. Raises OSError."""
    descriptor = os.open(".", _FOLDER, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Folder:
    """The folder of one tier, open.

    Args:
        name: name of the tier.
        path: path of the folder.
        key: config key that named it.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, name: str, path: Path, key: str) -> None:
        self.name, self.path, self._key = name, path / VERSION, key
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, private_folder(path, key))
            opened = []
            for folder in self._paths():
                opened.append(private_folder(folder, key))
                undo.callback(os.close, opened[-1])
            self.root, self.index, self.data, self.staged = opened
            self._mount_point = _mount_point(path)
            self._closing = undo.pop_all()

    def close(self) -> None:
        self._closing.close()

    def renew(self) -> None:
        """Open the folder again at its path, after it was removed; create it if its file system is still mounted. Otherwise
        chunks would fill the file system beneath. Descriptors keep their numbers, so other threads are not affected.
        Raises ConfigError."""
        if not os.path.ismount(self._mount_point):
            raise ConfigError(
                f"{self.path.parent}: its file system is no longer mounted at {self._mount_point}: mount it again "
                f"({_setting(self._key)})"
            )
        if self.name == MEMORY:  # the pool has made the folder above, too
            os.close(private_folder(self.path.parents[1], self._key))
        with contextlib.closing(Folder(self.name, self.path.parent, self._key)) as new:
            for old, fresh in zip(self._opened(), new._opened(), strict=True):
                os.dup2(fresh, old, inheritable=False)
            self._mount_point = new._mount_point

    def _paths(self) -> list[Path]:
        return [self.path, *(self.path / name for name in ("index", "data", "staged"))]

    def _opened(self) -> tuple[int, ...]:
        return self.root, self.index, self.data, self.staged

    @property
    def is_there(self) -> bool:
        """Whether its path, and the paths of its subfolders, still lead to the folders that are open here."""
        try:
            pairs = zip(self._paths(), self._opened(), strict=True)
            return all(
                os.path.samestat(os.lstat(path), os.fstat(descriptor)) for path, descriptor in pairs
            )
        except OSError:
            return False

    # Entries

    def text(self, key: bytes) -> str:
        """The text of a chunk's entry; empty if it has none. The text is always valid for the catalog, even if the link
        is not."""
        try:
            return os.readlink(key.hex().encode(), dir_fd=self.index).decode(errors="replace")
        except OSError:
            return ""

    def entry(self, key: bytes) -> Entry | None:
        return entry_of(self.text(key))

    def enter(self, key: bytes, entry: Entry, stamp: str) -> None:
        """Make or replace the entry of a chunk. Raises OSError.

        Args:
            stamp: a unique text, for the entry's temporary name.
        """
        name = file_name(key, LINK, stamp)
        os.symlink(entry.text(), name, dir_fd=self.staged)
        try:
            os.rename(name, key.hex(), src_dir_fd=self.staged, dst_dir_fd=self.index)
        except OSError:
            self.discard(name)  # the index was removed, or has a folder of this name
            raise
        if not self.is_whole(key, entry):  # evicted meanwhile, by a process that found no entry yet
            self.leave(key, entry.text())

    def leave(self, key: bytes, text: str) -> None:
        """Remove the entry of a chunk, if its text is still this one."""
        if self.text(key) == text:
            with contextlib.suppress(OSError):
                os.unlink(key.hex(), dir_fd=self.index)

    def is_whole(self, key: bytes, entry: Entry) -> bool:
        """Whether every file of the chunk is there, as long as it must be, and this user's alone."""
        for name, size in zip(entry.files(key), entry.sizes, strict=True):
            try:
                status = os.stat(name, dir_fd=self.data, follow_symlinks=False)
            except OSError:
                return False
            if status.st_size != size or _foreign(status):
                return False
        return True

    # Files

    def create(self, name: str, nbytes: int) -> int:
        """A descriptor of a new file, for writing, with all its room reserved.

        Raises:
            OSError: the file system has no room for it, or would have too little for the catalog. Nothing is left.
        """
        left = os.fstatvfs(self.root)
        # A tmpfs without a limit says that it has no blocks.
        if left.f_blocks and left.f_bavail * left.f_frsize < nbytes + RESERVE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(name, flags, 0o600, dir_fd=self.staged)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            os.close(descriptor)
            os.unlink(name, dir_fd=self.staged)
            raise
        return descriptor

    def settle(self, name: str) -> None:
        """The file is whole. Raises OSError."""
        os.rename(name, name, src_dir_fd=self.staged, dst_dir_fd=self.data)

    def is_settled(self, name: str) -> bool:
        """Whether a file is whole."""
        return self._exists(name, self.data) is not None

    def size(self, name: str) -> int:
        """Bytes of a file, whole or not; -1 if it is not there."""
        status = self._exists(name, self.data) or self._exists(name, self.staged)
        return status.st_size if status else -1

    def _exists(self, name: str, folder: int) -> os.stat_result | None:
        with contextlib.suppress(OSError):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        return None

    def discard(self, name: str) -> None:
        """Remove a file, whole or not, if it is there."""
        for folder in (self.staged, self.data):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)

    def erase(self, key: bytes, entry: Entry) -> None:
        """Remove a chunk: first its entry, then its files. An entry that was made meanwhile is removed last."""
        self.leave(key, entry.text())
        for name in entry.files(key):
            self.discard(name)
        self.leave(key, entry.text())

    def open_part(self, key: bytes, entry: Entry, part: str) -> int:
        """A descriptor of a part, for reading.

        Raises:
            PoolError: DAMAGED, the file is not there, not as long as it must be, or not this user's alone; REFUSED, it
                cannot be opened at the moment.
        """
        place = entry.parts.index(part)
        name, size = entry.files(key)[place], entry.sizes[place]
        try:
            # Without waiting: the name could be a pipe's.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(name, flags, dir_fd=self.data)
        except OSError as error:
            raise unreadable(f"{self.path}/data/{name}", error) from None
        status = os.fstat(descriptor)
        problem = _foreign(status) or (
            f"has {status.st_size} bytes, not {size}" if status.st_size != size else ""
        )
        if problem:
            os.close(descriptor)
            raise PoolError(Miss.DAMAGED, f"{self.path}/data/{name}: {problem}")
        return descriptor

    # The whole folder

    def names(self, *folders: int) -> Iterator[str]:
        """Names in these folders (descriptors), as they are now."""
        for folder in folders:
            entries: list[str] = []
            with contextlib.suppress(OSError), reopened(folder) as listed:
                entries = os.listdir(listed)
            yield from entries

    def entered(self) -> list[bytes]:
        """Keys of all entries, the oldest first by the machine's clock."""
        dated = []
        with (
            contextlib.suppress(OSError),
            reopened(self.index) as listed,
            os.scandir(listed) as entries,
        ):
            for name in entries:
                with contextlib.suppress(OSError, ValueError):
                    made_ns = name.stat(follow_symlinks=False).st_mtime_ns
                    dated.append((made_ns, bytes.fromhex(name.name)))
        return [key for _, key in sorted(dated)]


def _foreign(status: os.stat_result) -> str:
    """Why a file cannot be the pool's; empty if it can."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a plain file"
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        return "is not this user's alone"
    return ""
