# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a checkpoint's weights on disk. They depend on the tensors only: not on paths, file
names, or how the tensors are spread over files.

| file | sampled | full |
|---|---|---|
| safetensors | name, dtype and shape of every tensor, and bytes of every tensor | all bytes of every tensor |
| `.bin`, `.pt`, `.pth` (zip archives of torch) | name, size and CRC-32 of every entry, as the archive has them, and bytes of every entry | all bytes |
| GGUF and others | size, and 4,096 samples of each file | all bytes |
"""

import fcntl
import hashlib
import json
import logging
import os
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("pd_connector.kv.weights")

FINGERPRINT_BYTES = 16
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
_MOST_HEADER_BYTES = 100 << 20
_SAMPLE_BYTES = 1024
_SAMPLES_PER_TENSOR = 4
_MOST_SAMPLES = 40_000
"""Samples of a whole checkpoint. If four a tensor would be more than this, each tensor has fewer, but at least one."""
_SAMPLES_PER_FILE = 4096
_READERS = 8
_BLOCK_BYTES = 8 << 20
_LENGTHS_IN_ENTRY = 26
"""Where the header before an entry of a zip archive has the lengths of its name and its extra field,
the last of the header."""
_MODULUS = 1 << (8 * FINGERPRINT_BYTES)


class Weights(NamedTuple):
    """Fingerprints of a checkpoint.

    Attributes:
        sampled: of samples of its bytes.
        full: of all bytes; empty where only samples were read.
    """

    sampled: bytes
    full: bytes = b""


class _Tensor(NamedTuple):
    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the file
    stop: int

    @property
    def head(self) -> bytes:
        return f"{self.name}\0{self.dtype}\0{self.shape}\0".encode()


def read_weights(
    path: Path, *, full: bool = False, cache: Path | None = None, load_format: str = "auto"
) -> Weights | None:
    """Fingerprint the weights at a path.

    Args:
        path: a checkpoint's folder, or one file of weights.
        full: read all bytes, and not only samples. A terabyte takes minutes, once: see `cache`.
        cache: file that keeps fingerprints of whole files by device, inode, size and time of change;
            made if it is not there.
        load_format: which of several kinds of files the engine loads.

    Returns:
        None where there are no weights.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not what its name says.
    """
    files = [path] if path.is_file() else weight_files(path, load_format)
    if not files:
        return None
    sampled = _sum(_sampled(files))
    return Weights(sampled, _full(files, cache) if full else b"")


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


def _sum(parts: Iterable[int]) -> bytes:
    """A fingerprint of parts in any order."""
    return (sum(parts) % _MODULUS).to_bytes(FINGERPRINT_BYTES, "little")


def _digest(*parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"pd-weights")
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def _sampled(files: list[Path]) -> Iterator[int]:
    tensors: list[_Tensor] = []
    for file in files:
        if file.suffix == ".safetensors":
            tensors += _tensors(file)
        elif zipfile.is_zipfile(file):
            yield from _sampled_archive(file)
        else:
            size = file.stat().st_size
            yield _digest(str(size).encode(), *_samples_of(file, 0, size, _SAMPLES_PER_FILE))
    each = max(1, min(_SAMPLES_PER_TENSOR, _MOST_SAMPLES // max(1, len(tensors))))
    with ThreadPoolExecutor(_READERS, "pd-weights") as readers:
        yield from readers.map(lambda tensor: _sampled_tensor(tensor, each), tensors)


def _sampled_archive(file: Path) -> Iterator[int]:
    """Of each entry. Its CRC alone does not do: torch can be told to save without."""
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        for entry in archive.infolist():
            name = entry.filename.partition("/")[2]  # without the archive's own name
            stream.seek(entry.header_offset + _LENGTHS_IN_ENTRY)
            lengths: tuple[int, int] = struct.unpack("<HH", stream.read(4))
            start = entry.header_offset + _LENGTHS_IN_ENTRY + 4 + sum(lengths)
            samples = _samples_of(file, start, start + entry.compress_size, _SAMPLES_PER_TENSOR)
            yield _digest(f"{name}\0{entry.file_size}\0{entry.CRC}".encode(), *samples)


def _sampled_tensor(tensor: _Tensor, samples: int) -> int:
    return _digest(
        tensor.head, *_samples_of(tensor.file, tensor.start, tensor.stop, samples, tensor.name)
    )


def _samples_of(file: Path, start: int, stop: int, samples: int, name: str = "") -> Iterator[bytes]:
    """Samples of bytes [start, stop) of a file: the first, the last and evenly between. One sample
    alone is at a place that depends on the name, so that not all tensors are sampled at their start."""
    room = max(0, stop - start - _SAMPLE_BYTES)
    if samples == 1:
        places = [room * (_digest(name.encode()) % 97) // 96]
    else:
        places = sorted({room * sample // (samples - 1) for sample in range(samples)})
    with file.open("rb", buffering=0) as stream:
        for place in places:
            nbytes = min(_SAMPLE_BYTES, stop - start - place)
            yield os.pread(stream.fileno(), nbytes, start + place)


def _tensors(file: Path) -> list[_Tensor]:
    """The tensors in a safetensors file, by its header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"{file.name}: not a safetensors file, or cut off")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file.name}: the safetensors header is no JSON: {error}") from None
    found = []
    try:
        for name, told in header.items():
            if name == "__metadata__":
                continue
            begin, end = told["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(
                    f"{file.name}: tensor {name} lies outside the file, which is cut off"
                )
            shape = tuple(int(extent) for extent in told["shape"])
            place = 8 + length + begin, 8 + length + end
            found.append(_Tensor(file, name, str(told["dtype"]), shape, *place))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file.name}: the safetensors header lacks {error!r}") from None
    return found


def _full(files: list[Path], cache: Path | None) -> bytes:
    known = _read_cache(cache)
    parts: list[int] = []
    for file in files:
        key = _cache_key(file)
        if key not in known:
            # The ranks of an engine begin at the same time: one of them hashes, the others wait.
            with _locked(cache):
                known = _read_cache(cache)
                if key not in known:
                    logger.info("hashing %s (weights: full)", file)
                    known[key] = sum(_whole(file)) % _MODULUS
                    _write_cache(cache, known)
        parts.append(known[key])
    return _sum(parts)


@contextmanager
def _locked(cache: Path | None) -> Iterator[None]:
    """Alone with the cache among all processes, if there is one that can be written."""
    if cache is None:
        yield
        return
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        lock = cache.with_suffix(".lock").open("a")
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _whole(file: Path) -> Iterator[int]:
    spans = [(b"", 0, file.stat().st_size)]
    if file.suffix == ".safetensors":
        spans = [(tensor.head, tensor.start, tensor.stop) for tensor in _tensors(file)]
    with file.open("rb", buffering=0) as stream:
        for head, start, stop in spans:
            blocks = (
                os.pread(stream.fileno(), min(_BLOCK_BYTES, stop - place), place)
                for place in range(start, stop, _BLOCK_BYTES)
            )
            yield _digest(head, *blocks)


def _cache_key(file: Path) -> str:
    stat = file.stat()  # of the file itself where this is a link, as in Hugging Face's cache
    # The time of change, beside that of modification: this one cannot be set back.
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


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
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as file:
            json.dump({key: f"{value:x}" for key, value in known.items()}, file)
        Path(file.name).replace(cache)
    except OSError as error:
        logger.warning("fingerprints of weights are not kept in %s: %s", cache, error)
