# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint, held open from the moment an engine begins to load them.

A name may lead to another file seconds later: a link is switched, a folder moved, a branch of a repository moves
on. An open descriptor still reads the file that the engine has loaded.

The engine opens files by name, after they were opened here. Links on the way to a file are therefore looked at before
and after: a link that was switched to another file and back has another time of change.
"""

import io
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from errno import ELOOP
from pathlib import Path
from stat import S_ISLNK
from typing import Any, BinaryIO, NamedTuple, Self

_KINDS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""In this order: a folder that has files of several kinds is loaded from the first."""
_KINDS_OF_FORMAT = {
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
}
"""Files that engines load with an explicit `--load-format`."""
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin", "scheduler.pt"})
_MOST_STEPS = 1024  # of a path; links that lead to each other have no end
_INDEX = "model.safetensors.index.json"
_INDEX_OF_FORMAT = {"mistral": "consolidated.safetensors.index.json"}


class FileState(NamedTuple):
    """A file, or a link, and its state. Unlike the modification time, the change time (ctime) cannot be set back."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Self:
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class OpenFile:
    """A file of weights. Any number of threads may read it.

    Args:
        descriptor: the file's descriptor, if another process has opened it and passed it on; None: it is opened here.
            Only the process that opened it knows whether it was `renamed`.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path = path
        if descriptor is None:
            self._file, self._links = io.FileIO(path), links(path)
        else:
            self._file, self._links = io.FileIO(descriptor), {}
        self._state = self._state_now()

    @property
    def descriptor(self) -> int:
        """The open file's number in this process."""
        return self._file.fileno()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def suffix(self) -> str:
        return self.path.suffix

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read(self, nbytes: int, place: int) -> bytes:
        """At most `nbytes` bytes, from the offset `place` on."""
        return os.pread(self.descriptor, nbytes, place)

    def read_into(self, buffer: memoryview, place: int) -> int:
        """Fill a buffer from the offset `place` on, as far as the file goes. Returns the number of bytes."""
        return os.preadv(self.descriptor, [buffer], place)

    def stream(self) -> BinaryIO:
        """The file from its start, with a position of its own."""
        return io.BufferedReader(_Stream(self))

    @property
    def key(self) -> str:
        """The file and its state when it was opened."""
        return ":".join(map(str, self._state))

    @property
    def changed(self) -> bool:
        """Whether it was written to since it was opened."""
        return self._state_now() != self._state

    @property
    def renamed(self) -> bool:
        """Whether its name leads to another file or to none now, or has led to another file meanwhile."""
        try:
            same = os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
            return not same or links(self.path) != self._links
        except OSError:
            return True

    def same(self, other: "OpenFile") -> bool:
        """Whether both were opened by the same name, and it led to the same file by the same links, in the same state."""
        mine, theirs = ((file.path, file._state, file._links) for file in (self, other))
        return mine == theirs

    def close(self) -> None:
        self._file.close()

    def _state_now(self) -> FileState:
        return FileState.of(os.fstat(self._file.fileno()))


class _Stream(io.RawIOBase):
    def __init__(self, file: OpenFile) -> None:
        self._read_at, self._size, self._place = file.read, file.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        content = self._read_at(len(buffer), self._place)
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = max(0, start + offset)
        return self._place


class CheckpointFiles:
    """The files of one checkpoint, which an engine loads now.

    Attributes:
        weights: fingerprint of all their bytes (`kv.weights.fingerprint`); empty until they were read.
        forms: fingerprint of its tensors' names, dtypes and shapes (`kv.weights.tensor_forms`), once it was computed.
        problem: why they may differ from what the engine has loaded; empty if they cannot.
        nbytes: size of all files when they were opened.
        reader: reads them (`agent.weights_reader.reading`); None before that has begun.
    """

    def __init__(self, files: Sequence[OpenFile]) -> None:
        self.files = tuple(files)
        self.problem = ""
        self.weights = self.forms = b""
        self.reader: Any = None
        self.nbytes = sum(file.size for file in files)

    @classmethod
    def open(cls, path: Path, load_format: str = "auto") -> "CheckpointFiles | None":
        """Open the weights at a path: a checkpoint's folder, or one file. None where there are none.

        Args:
            load_format: which of several kinds of files the engine loads.

        Raises:
            OSError: a file cannot be opened.
        """
        paths = [path] if path.is_file() else weight_files(path, load_format)
        files: list[OpenFile] = []
        try:
            files += map(OpenFile, paths)
        except OSError:
            for file in files:
                file.close()
            raise
        return cls(files) if files else None

    def loaded(self) -> None:
        """The engine has loaded the files by their names. Check that the names have led to these files all the time."""
        for file in self.files:
            if file.renamed and not self.problem:
                self.problem = f"{file.name} was replaced by another file while it was loaded"
        self.look()

    def look(self) -> None:
        """Find out whether one was written to since it was opened."""
        for file in self.files:
            if file.changed and not self.problem:
                self.problem = f"{file.name} was written to since it was loaded"

    def same(self, other: "CheckpointFiles") -> bool:
        """Whether these are the same open files, see `OpenFile.same`."""
        return len(self.files) == len(other.files) and all(
            mine.same(theirs) for mine, theirs in zip(self.files, other.files, strict=True)
        )

    def close(self) -> None:
        for file in self.files:
            file.close()


def links(path: Path) -> dict[Path, FileState]:
    """The links that lead from a name to its file, each with its state.

    Raises:
        OSError: the name leads to no file.
    """
    result: dict[Path, FileState] = {}
    here, left = Path(path.anchor or "."), [*reversed(path.absolute().parts)]
    for _ in range(_MOST_STEPS):
        if not left:
            return result
        name = left.pop()
        here = here.parent if name == os.pardir else here / name  # `here` has no links in it
        stat = here.lstat()
        if S_ISLNK(stat.st_mode):
            result[here] = FileState.of(stat)
            left += reversed(here.readlink().parts)
            here = here.parent
    raise OSError(ELOOP, os.strerror(ELOOP), str(path))


def weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The weight files that an engine loads from a checkpoint's folder with this `--load-format`."""
    if not folder.is_dir():
        return []
    for kind in _KINDS_OF_FORMAT.get(load_format, _KINDS):
        files = sorted(file for file in folder.glob(kind) if file.name not in _NOT_WEIGHTS)
        if not files:
            continue
        index = folder / _INDEX_OF_FORMAT.get(load_format, _INDEX)
        listed = _listed(index) if kind.endswith(".safetensors") else set()
        return [file for file in files if file.name in listed] or files
    return []


def _listed(index: Path) -> set[str]:
    """Names of the files in the checkpoint's index, if there is one. Files that the index does not name are other
    copies of the weights."""
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        return set(json.loads(index.read_text())["weight_map"].values())
    return set()
