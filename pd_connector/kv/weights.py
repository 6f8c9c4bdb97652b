# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a checkpoint's weights on disk. They depend on the tensors only: not on paths, file
names, or how the tensors are spread over files.

| file | sampled | full |
|---|---|---|
| safetensors | name, dtype and shape of every tensor, and bytes of every tensor | all bytes of every tensor |
| `.bin`, `.pt`, `.pth` (zip archives of torch) | name, size and CRC-32 of every entry, as the archive has them, and bytes of every entry | all bytes of every entry |
| GGUF | name, type and shape of every tensor, and bytes of every tensor | all bytes of every tensor |
| others | size, and 4,096 samples of each file | all bytes |
"""

import fcntl
import functools
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from pd_connector.kv.checkpoint_files import CheckpointFiles, OpenFile, Weights
from pd_connector.kv.weight_samples import (
    FINGERPRINT_BYTES,
    MODULUS,
    digest,
    sampled,
    spans,
    total,
)

logger = logging.getLogger("pd_connector.kv.weights")

_READ_BYTES = 8 << 20
_CACHE = "pd-connector/weights.json"
_ALL_READ = "each rank reads all of the weights, at each start"
_HASH = "xxh3"
"""Named in the cache, so that what another hash has found is not taken for this one's."""


def read_weights(
    parts: Sequence[CheckpointFiles], *, full: bool = False, cache: Path | None = None
) -> Weights:
    """Fingerprint the weights of a model that is loaded from these checkpoints, in this order. What was read once
    is not read again.

    Args:
        full: read all bytes, and not only samples.
        cache: see `full_fingerprint`.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not what its name says.
    """
    for part in parts:
        known = part.weights or sampled(part.files)
        if full and not known.full:
            known = known._replace(full=full_fingerprint(part.files, cache))
        part.weights = known
    return _together([part.weights for part in parts if part.weights is not None])


def cache_file() -> Path | None:
    """Where fingerprints of whole files are kept; None if there is no place for them."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a container's user that /etc/passwd does not name, without HOME
        return _temporary("~/.cache", "this user has no home")
    return Path(home) / _CACHE


def _usable(cache: Path | None) -> Path | None:
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
        found = folder.lstat()
        alone = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
        if not alone or found.st_uid != os.geteuid():
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


def _together(parts: Sequence[Weights]) -> Weights:
    """The fingerprints of a model that is loaded from several checkpoints, in this order."""
    if len(parts) == 1:
        return parts[0]
    kinds = zip(*parts, strict=True)
    return Weights(*(_digest_of(prints) if all(prints) else b"" for prints in kinds))


def _digest_of(prints: Iterable[bytes]) -> bytes:
    return digest(*prints).to_bytes(FINGERPRINT_BYTES, "little")


def full_fingerprint(
    files: Sequence[OpenFile],
    cache: Path | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> bytes:
    """Fingerprint of all bytes of every tensor. XXH3 reads several GB/s on one core; Python's lock is free
    meanwhile.

    Args:
        cache: file that keeps fingerprints of whole files by device, inode, size and time of change, so that
            they are read once; made if it is not there. Where it cannot be written, one in the folder for temporary
            files takes its place.
        stopped: asked often; nothing is found once it says so.

    Returns:
        Empty if it was stopped.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not what its name says.
    """
    known = _read_cache(cache)
    parts: list[int] = []
    for file in files:
        key = f"{_HASH}:{file.key}"
        if key not in known:
            # The ranks of an engine begin at the same time: one of them hashes, the others wait.
            place = _usable(cache)
            with _locked(place):
                known |= _read_cache(place)
                if key not in known:
                    logger.info("hashing all of %s", file.name)
                    known[key] = sum(_whole(file, stopped)) % MODULUS
                    if stopped():
                        return b""
                    if not file.changed:
                        _write_cache(place, known)
        parts.append(known[key])
    return total(parts)


@contextmanager
def _locked(cache: Path | None) -> Iterator[None]:
    """Within, no other process uses the cache, if there is one."""
    if cache is None:
        yield
        return
    with cache.with_suffix(".lock").open("a") as lock:
        # Some network file systems have no locks: then ranks may read the same.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _whole(file: OpenFile, stopped: Callable[[], bool]) -> Iterator[int]:
    """A number for each part of a file. What is not of a tensor does not count: an archive's own name, notes
    in a header."""
    for head, start, stop in spans(file):
        found = xxhash.xxh3_128()
        for place in range(start, stop, _READ_BYTES):
            if stopped():
                return
            found.update(file.read(min(_READ_BYTES, stop - place), place))
        yield digest(head, found.digest())


def _read_cache(cache: Path | None) -> dict[str, int]:
    if cache is None:
        return {}
    try:
        known = json.loads(cache.read_text())
        return {str(key): int(value, 16) for key, value in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write_cache(cache: Path | None, known: dict[str, int]) -> None:
    """Replace the cache, if there is one."""
    if cache is None:
        return
    try:
        descriptor, draft = tempfile.mkstemp(dir=cache.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({key: f"{value:x}" for key, value in known.items()}, file)
            Path(draft).replace(cache)
        except OSError:
            Path(draft).unlink()
            raise
    except OSError as error:
        _complain(str(cache.parent), error.strerror or str(error), _ALL_READ)
