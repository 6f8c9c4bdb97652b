# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of a checkpoint's weights on disk. They depend on the tensors only: not on paths, file
names, or how the tensors are spread over files.

| file | sampled | full |
|---|---|---|
| safetensors | name, dtype and shape of every tensor, and bytes of every tensor | all bytes of every tensor |
| `.bin`, `.pt`, `.pth` (zip archives of torch) | name, size and CRC-32 of every entry, as the archive has them, and bytes of every entry | all bytes |
| GGUF | name, type and shape of every tensor, and bytes of every tensor | all bytes |
| others | size, and 4,096 samples of each file | all bytes |
"""

import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pd_connector.kv.tensor_files import safetensors
from pd_connector.kv.weight_samples import FINGERPRINT_BYTES, MODULUS, digest, sampled, total

logger = logging.getLogger("pd_connector.kv.weights")

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
_BLOCK_BYTES = 8 << 20


class Weights(NamedTuple):
    """Fingerprints of a checkpoint.

    Attributes:
        sampled: of few samples of its bytes, as releases before have it.
        full: of all bytes; empty where only samples were read.
        fine: of more samples, which see parts of fused tensors, and each tensor of a GGUF file.
    """

    sampled: bytes
    full: bytes = b""
    fine: bytes = b""


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
    coarse, fine = sampled(files)
    return Weights(coarse, _full(files, cache) if full else b"", fine)


def together(parts: Sequence[Weights]) -> Weights:
    """Of a model that is loaded from several checkpoints, in this order."""
    if len(parts) == 1:
        return parts[0]
    kinds = zip(*parts, strict=True)
    return Weights(*(_digest_of(prints) if all(prints) else b"" for prints in kinds))


def _digest_of(prints: Iterable[bytes]) -> bytes:
    return digest(*prints).to_bytes(FINGERPRINT_BYTES, "little")


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
                    known[key] = sum(_whole(file)) % MODULUS
                    _write_cache(cache, known)
        parts.append(known[key])
    return total(parts)


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
        spans = [(tensor.head, tensor.start, tensor.stop) for tensor in safetensors(file)]
    with file.open("rb", buffering=0) as stream:
        for head, start, stop in spans:
            blocks = (
                os.pread(stream.fileno(), min(_BLOCK_BYTES, stop - place), place)
                for place in range(start, stop, _BLOCK_BYTES)
            )
            yield digest(head, *blocks)


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
