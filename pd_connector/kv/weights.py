# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a checkpoint's weights: of all bytes, and of nothing else.

| file | what counts |
|---|---|
| safetensors | name, dtype, shape and all bytes of every tensor; not its order, nor how the tensors are spread over files |
| `.bin`, `.pt`, `.pth`, GGUF | all bytes of every file |

XXH3 reads several GB/s on one core; Python's lock is free meanwhile.
"""

import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from pd_connector.kv.checkpoint_files import OpenFile

_MOST_HEADER_BYTES = 100 << 20


class Tensor(NamedTuple):
    """A tensor in a file: bytes [start, stop)."""

    file: OpenFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def head(self) -> bytes:
        return f"{self.name}\0{self.dtype}\0{self.shape}\0".encode()


def safetensors(file: OpenFile) -> list[Tensor]:
    """The tensors in a safetensors file. Raises ValueError if the file is not a safetensors file, or is cut off."""
    size = file.size
    with file.stream() as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"{file.name}: not a safetensors file, or cut off")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file.name}: the safetensors header is not JSON: {error}") from None
    tensors = []
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(
                    f"{file.name}: tensor {name} is outside the file, which is truncated"
                )
            shape = tuple(int(extent) for extent in entry["shape"])
            place = 8 + length + begin, 8 + length + end
            tensors.append(Tensor(file, name, str(entry["dtype"]), shape, *place))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file.name}: the safetensors header lacks {error!r}") from None
    return tensors


logger = logging.getLogger("pd_connector.kv.weights")

FINGERPRINT_BYTES = 16
_MODULUS = 1 << (8 * FINGERPRINT_BYTES)
_READ_BYTES = 8 << 20
_PIECE_BYTES = 256 << 20
"""A file without a list of its tensors is read in pieces of this size, by several threads."""
_MOST_THREADS = 16
"""More threads read no faster: these read more bytes a second than a processor's memory gives."""
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of a processor that a container may use in a period, and the period."""
_SPARE_S, _SLOW_BYTES_S = 120.0, 50e6
"""A file that another process reads is waited for as long as a disk with this rate would take, and some seconds more."""
_LOOK_S = 0.05
_HELD = frozenset({errno.EACCES, errno.EAGAIN})
_CACHE = "pd-connector/weights.json"
_ALL_READ = "each rank reads all of the weights, at each start"
_SAFETENSORS = ".safetensors"


class _Part(NamedTuple):
    """A part of a file that is hashed by itself: its description, and its bytes [start, stop)."""

    head: bytes
    start: int
    stop: int


def fingerprint(
    files: Sequence[OpenFile],
    cache: Path | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> bytes:
    """Fingerprint of all bytes of a checkpoint's files, `FINGERPRINT_BYTES` bytes. Uses all cores of the calling thread.

    Args:
        cache: file that keeps fingerprints of whole files by device, inode, size and time of change, so that
            they are read once; made if it is not there. Where it cannot be written, one in the folder for temporary
            files takes its place.
        progress: called from any thread, with the number of bytes that were read or found cached since the last call.

    Raises:
        OSError: a file cannot be read.
        ValueError: a safetensors file is none.
    """
    cached = _read_cache(cache)
    place = usable(cache) if any(_key(file) not in cached for file in files) else None
    sums: list[int] = []
    for file in files:
        key = _key(file)
        if key not in cached:
            # The ranks of an engine begin at the same time: one of them reads, the others wait.
            with _locked(place, key, _SPARE_S + file.size / _SLOW_BYTES_S):
                cached |= _read_cache(place)
                if key not in cached:
                    logger.info("reading all of %s", file.name)
                    sums.append(_sum(file, progress))
                    cached[key] = sums[-1]
                    if not file.changed:
                        _write_cache(place, cached)
                    continue
        progress(file.size)
        sums.append(cached[key])
    return _bytes(sum(sums))


def known_fingerprint(files: Sequence[OpenFile], cache: Path | None) -> bytes:
    """`fingerprint`, if the cache has all files; empty if not."""
    cached = _read_cache(cache)
    keys = [_key(file) for file in files]
    return _bytes(sum(cached[key] for key in keys)) if cached.keys() >= set(keys) else b""


def combined(prints: Sequence[bytes]) -> bytes:
    """The fingerprint of a model that is loaded from several checkpoints, in this order. Empty if a checkpoint's is
    empty."""
    if not all(prints):
        return b""
    return prints[0] if len(prints) == 1 else _bytes(_digest(*prints))


def tensor_forms(files: Iterable[OpenFile]) -> bytes:
    """Fingerprint of names, dtypes and shapes of all tensors; empty where a file does not list its tensors.

    Raises:
        OSError: a file cannot be read.
        ValueError: a safetensors file is none.
    """
    total = 0
    for file in files:
        if file.suffix != _SAFETENSORS:
            return b""
        total += sum(_digest(tensor.head) for tensor in safetensors(file))
    return _bytes(total)


def cache_file() -> Path | None:
    """Where fingerprints of whole files are kept; None if there is no place for them."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a container's user that /etc/passwd does not name, without HOME
        return _temporary("~/.cache", "this user has no home")
    return Path(home) / _CACHE


def usable(cache: Path | None) -> Path | None:
    """This cache if its folder can be written, else the one in the folder for temporary files."""
    if cache is None:
        return None
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.with_suffix(".lock").open("a").close()
    except OSError as error:
        return _temporary(str(cache.parent), error.strerror or str(error))
    return cache


def _temporary(instead_of: str, why: str) -> Path | None:
    """A cache for the ranks of this machine until it is cleaned up; None if it would not be this user's alone."""
    try:
        folder = Path(tempfile.gettempdir()) / f"pd-connector-{os.geteuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        alone = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if not alone or status.st_uid != os.geteuid():
            raise OSError(f"{folder} is not a folder of this user alone")
    except OSError as error:
        _complain(instead_of, f"{why}; {error}", _ALL_READ)
        return None
    _complain(instead_of, why, f"they are kept in {folder}, and are read again when that is gone")
    return folder / Path(_CACHE).name


@functools.cache
def _complain(place: str, why: str, then: str) -> None:
    """Once for each place: a checkpoint can have hundreds of files."""
    logger.warning(
        "fingerprints of weights cannot be kept in %s (%s): %s. Set XDG_CACHE_HOME to a folder that this user can write",
        place,
        why,
        then,
    )


def _key(file: OpenFile) -> str:
    """A file's key in the cache. It names the hash and the kind of file, because each has sums of its own."""
    return f"{'xxh3' if file.suffix == _SAFETENSORS else 'xxh3-pieces'}:{file.key}"


def _parts(file: OpenFile) -> list[_Part]:
    """The parts of a file. Notes in a safetensors header belong to none, so they are not hashed.

    Raises:
        OSError: the file cannot be read.
        ValueError: a safetensors file is none.
    """
    if file.suffix == _SAFETENSORS:
        return [_Part(each.head, each.start, each.stop) for each in safetensors(file)]
    size = file.size
    starts = range(0, max(1, size), _PIECE_BYTES)
    return [
        _Part(f"{start}\0{size}".encode(), start, min(size, start + _PIECE_BYTES))
        for start in starts
    ]


def _sum(file: OpenFile, progress: Callable[[int], None]) -> int:
    """The sum of the digests of a file's parts, which several threads read."""

    def read(part: _Part) -> int:
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(_READ_BYTES, part.stop - part.start)))
        for place in range(part.start, part.stop, _READ_BYTES):
            target = buffer[: part.stop - place]
            if file.read_into(target, place) != len(target):
                raise OSError(f"{file.name} was cut off while it was read")
            digest.update(target)
            progress(len(target))
        return _digest(part.head, digest.digest())

    with ThreadPoolExecutor(min(_MOST_THREADS, _cores()), "pd-weights") as readers:
        return sum(readers.map(read, _parts(file))) % _MODULUS


def _cores() -> int:
    """Number of cores that this process can keep busy: the cores of its affinity mask, at most its cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # "max": there is no limit
        quota, period = map(int, _CPU_QUOTA.read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def _digest(*parts: bytes) -> int:
    """A number for bytes of a checkpoint."""
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"pd-weights")
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def _bytes(number: int) -> bytes:
    return (number % _MODULUS).to_bytes(FINGERPRINT_BYTES, "little")


@contextmanager
def _locked(cache: Path | None, key: str, most_s: float) -> Iterator[None]:
    """Keep other processes from reading the file with this key during the block, if there is a cache.

    This only saves work, so it waits `most_s` at most: another reader may hang. Each file has a byte of the lock's file.
    """
    if cache is None:
        yield
        return
    deadline = time.monotonic() + most_s
    with cache.with_suffix(".lock").open("a") as lock:
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, zlib.crc32(key.encode()))
                break
            except OSError as error:
                # Some network file systems have no locks: then ranks may read the same.
                if error.errno not in _HELD or time.monotonic() >= deadline:
                    break
            time.sleep(_LOOK_S)
        yield


def _read_cache(cache: Path | None) -> dict[str, int]:
    if cache is None:
        return {}
    try:
        cached = json.loads(cache.read_text())
        return {str(key): int(value, 16) for key, value in cached.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write_cache(cache: Path | None, cached: dict[str, int]) -> None:
    """Add to the cache, if there is one. If two processes write at the same moment, one entry can be lost; its file is
    then read again at the next start."""
    if cache is None:
        return
    cached = _read_cache(cache) | cached
    try:
        descriptor, draft = tempfile.mkstemp(dir=cache.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({key: f"{value:x}" for key, value in cached.items()}, file)
            Path(draft).replace(cache)
        except OSError:
            Path(draft).unlink()
            raise
    except OSError as error:
        _complain(str(cache.parent), error.strerror or str(error), _ALL_READ)
