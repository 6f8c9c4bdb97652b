# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint, held open from the moment an engine begins to load them.

A name may lead to another file seconds later: a link is switched, a folder moved, a branch of a repository moves
on. Whatever is read through an open file is of the file that the engine has loaded.
"""

import io
import json
import os
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

_KINDS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""In this order: a folder that has files of several kinds is loaded from the first."""
_KINDS_OF_FORMAT = {
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
}
"""What engines load if told a format (`--load-format`) that is not their first choice."""
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin", "scheduler.pt"})
_INDEX = "model.safetensors.index.json"
_INDEX_OF_FORMAT = {"mistral": "consolidated.safetensors.index.json"}


class OpenFile:
    """A file of weights. Any number of threads may read it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self.key = self._key()

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def suffix(self) -> str:
        return self._path.suffix

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read(self, nbytes: int, place: int) -> bytes:
        """At most `nbytes` bytes, from the offset `place` on."""
        return os.pread(self._file.fileno(), nbytes, place)

    def stream(self) -> BinaryIO:
        """The file from its start, with a position of its own."""
        return io.BufferedReader(_Stream(self))

    @property
    def changed(self) -> bool:
        """Whether it was written to since it was opened."""
        return self._key() != self.key

    @property
    def renamed(self) -> bool:
        """Whether its name leads to another file by now, or to none."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return True

    def close(self) -> None:
        self._file.close()

    def _key(self) -> str:
        """The file and its state. It has the time of change beside the time of modification, because the time of
        change cannot be set back."""
        stat = os.fstat(self._file.fileno())
        return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


class _Stream(io.RawIOBase):
    def __init__(self, file: OpenFile) -> None:
        self._read_at, self._size, self._place = file.read, file.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        found = self._read_at(len(buffer), self._place)
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = max(0, start + offset)
        return self._place


class Weights(NamedTuple):
    """Fingerprints of a checkpoint.

    Attributes:
        sampled: of samples of its bytes, which see parts of fused tensors.
        forms: of names, dtypes and shapes of its tensors.
        full: of all bytes; empty where only samples were read.
    """

    sampled: bytes
    forms: bytes = b""
    full: bytes = b""


class CheckpointFiles:
    """The files of one checkpoint, which an engine loads now.

    Attributes:
        weights: what was found in them (`kv.weights.read_weights`); stays when they are closed.
        problem: why they are not known to be what the engine has loaded; empty if they are.
    """

    def __init__(self, files: Sequence[OpenFile]) -> None:
        self.files = tuple(files)
        self.problem = ""
        self.weights: Weights | None = None

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
        """The engine has loaded them. While it did so by their names, these must have led to them."""
        for file in self.files:
            if file.renamed and not self.problem:
                self.problem = f"{file.name} was exchanged for another file while it was loaded"
        self.look()

    def look(self) -> None:
        """Find out whether one was written to since it was opened."""
        for file in self.files:
            if file.changed and not self.problem:
                self.problem = f"{file.name} was written to since it was loaded"

    def close(self) -> None:
        for file in self.files:
            file.close()


class LoadedFiles:
    """Checkpoints that an engine has loaded in this process.

    Attributes:
        files: by what the engine was told of them, each as its last load found it.
    """

    def __init__(self) -> None:
        self.files: dict[Hashable, CheckpointFiles] = {}
        self._under_way: list[CheckpointFiles] = []

    def begin(self, place: Hashable, files: CheckpointFiles | None) -> None:
        """The engine is about to read these files."""
        before = self.files.get(place)
        if before in self._under_way:  # looked at again, shortly before it is read
            self._under_way.remove(before)
            before.close()
        if files is not None:
            self.files[place] = files
            self._under_way.append(files)

    def end(self) -> None:
        """The engine has read everything that it began to read."""
        for files in self._under_way:
            files.loaded()
        self._under_way.clear()


def weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    """The files of a checkpoint's folder that hold the weights an engine loads, told this format."""
    if not folder.is_dir():
        return []
    for kind in _KINDS_OF_FORMAT.get(load_format, _KINDS):
        found = sorted(file for file in folder.glob(kind) if file.name not in _NOT_WEIGHTS)
        if not found:
            continue
        index = folder / _INDEX_OF_FORMAT.get(load_format, _INDEX)
        listed = _listed(index) if kind.endswith(".safetensors") else set()
        return [file for file in found if file.name in listed] or found
    return []


def _listed(index: Path) -> set[str]:
    """Names of the files in the index, if there is one: others beside them are other copies."""
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        return set(json.loads(index.read_text())["weight_map"].values())
    return set()
