# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a checkpoint from samples of its files.

The samples of a tensor are dense enough that a part of it shows: the keys of a fused `qkv_proj`, a single
expert of a fused `experts`, the columns of one third of each row. Their number less one is a prime, so that
they do not all fall on the same place of a row.
"""

import bisect
import hashlib
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pd_connector.kv.checkpoint_files import OpenFile, Weights
from pd_connector.kv.tensor_files import Tensor, gguf, safetensors

FINGERPRINT_BYTES = 16
MODULUS = 1 << (8 * FINGERPRINT_BYTES)
_SAMPLE_BYTES = 1024
_SAMPLES_PER_ENTRY = 4
"""An archive's entry also has a CRC of all its bytes, so a few samples are enough."""
_SAMPLES_PER_FILE = 4096
_SHARED_SAMPLES = 16_000
"""Samples that the tensors share evenly, and as many again by their size. Single experts have their size only."""
_MOST_EVENLY = 128
_EXPERT = re.compile(r"\.experts\.\d+\.")
_PRIMES = (0, 1, 2, 3, 5, 7, 13, 31, 61, 79, 127, 163, 211, 251, 383, 509, 1021, 2039)
_READERS = 8
_BATCH = 64
"""Tensors that one thread reads at a time."""
_LENGTHS_IN_ENTRY = 26
"""Where the header before an entry of a zip archive has the lengths of its name and its extra field,
the last of the header."""


def sampled(files: Iterable[OpenFile]) -> Weights:
    """The fingerprints of files of weights, without the one that takes all bytes.

    Raises:
        OSError: a file cannot be read.
        ValueError: a safetensors file is none.
    """
    tensors: list[Tensor] = []
    parts: list[int] = []
    forms: list[int] = []
    for file in files:
        if file.suffix == ".safetensors":
            tensors += safetensors(file)
        elif _is_archive(file):
            forms += [digest(head) for head, *_ in _entries(file, with_sums=False)]
            parts += [
                digest(head, *_evenly(file, start, stop, _SAMPLES_PER_ENTRY))
                for head, start, stop in _entries(file, with_sums=True)
            ]
        elif found := gguf(file):
            tensors += found
        else:
            size = str(file.size).encode()
            parts.append(digest(size, *_evenly(file, 0, file.size, _SAMPLES_PER_FILE)))
            forms.append(digest(size))
    works = list(zip(tensors, _shares(tensors), strict=True))
    batches = [works[first : first + _BATCH] for first in range(0, len(works), _BATCH)]
    with ThreadPoolExecutor(_READERS, "pd-weights") as readers:
        for numbers in readers.map(_read_batch, batches):
            parts += numbers
    forms += [digest(tensor.head) for tensor in tensors]
    return Weights(total(parts), total(forms))


def total(parts: Iterable[int]) -> bytes:
    """A fingerprint of parts in any order."""
    return (sum(parts) % MODULUS).to_bytes(FINGERPRINT_BYTES, "little")


def digest(*parts: bytes) -> int:
    """A number for bytes of a checkpoint."""
    found = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"pd-weights")
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest(), "little")


def _shares(tensors: list[Tensor]) -> list[int]:
    """How many samples each tensor has. Depends on the tensors, and not on their files."""
    ordinary = sum(_EXPERT.search(tensor.name) is None for tensor in tensors)
    evenly = min(_MOST_EVENLY, _SHARED_SAMPLES // max(1, ordinary))
    nbytes = max(1, sum(tensor.stop - tensor.start for tensor in tensors))

    def share(tensor: Tensor) -> int:
        wanted = _SHARED_SAMPLES * (tensor.stop - tensor.start) // nbytes
        if not _EXPERT.search(tensor.name):
            wanted += evenly
        return 1 + _PRIMES[bisect.bisect_left(_PRIMES, max(1, wanted)) - 1]

    return [share(tensor) for tensor in tensors]


def spans(file: OpenFile) -> list[tuple[bytes, int, int]]:
    """The parts of a file of weights that count: what each is, and its bytes [start, stop).

    Raises:
        OSError: the file cannot be read.
        ValueError: a safetensors file is none.
    """
    if file.suffix == ".safetensors":
        tensors = safetensors(file)
    elif _is_archive(file):
        return list(_entries(file, with_sums=False))
    else:
        tensors = gguf(file)
        if not tensors:
            return [(b"", 0, file.size)]
    return [(tensor.head, tensor.start, tensor.stop) for tensor in tensors]


def _is_archive(file: OpenFile) -> bool:
    with file.stream() as stream:
        return zipfile.is_zipfile(stream)


def _entries(file: OpenFile, *, with_sums: bool) -> Iterator[tuple[bytes, int, int]]:
    """The entries of an archive, as `spans` has parts, with their CRC or without. That alone does not do:
    torch can be told to save without."""
    with file.stream() as stream, zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            name = entry.filename.partition("/")[2]  # without the archive's own name
            lengths = struct.unpack("<HH", file.read(4, entry.header_offset + _LENGTHS_IN_ENTRY))
            start = entry.header_offset + _LENGTHS_IN_ENTRY + 4 + sum(lengths)
            head = f"{name}\0{entry.file_size}" + (f"\0{entry.CRC}" if with_sums else "")
            yield head.encode(), start, start + entry.compress_size


def _read_batch(works: Iterable[tuple[Tensor, int]]) -> list[int]:
    """The number of each tensor, with how many samples are taken of it."""
    return [digest(tensor.head, *_dense(tensor, samples)) for tensor, samples in works]


def _dense(tensor: Tensor, samples: int) -> Iterator[bytes]:
    nbytes = tensor.stop - tensor.start
    if samples * _SAMPLE_BYTES < nbytes:
        return _samples(tensor, samples)
    return _read(tensor, range(0, nbytes, _SAMPLE_BYTES))  # all of it


def _samples(tensor: Tensor, samples: int) -> Iterator[bytes]:
    """The first, the last and evenly between. One sample alone is at a place that depends on the name, so
    that not all tensors are sampled at their start."""
    room = max(0, tensor.stop - tensor.start - _SAMPLE_BYTES)
    places = [room * (digest(tensor.name.encode()) % 97) // 96]
    if samples > 1:
        places = sorted({room * sample // (samples - 1) for sample in range(samples)})
    return _read(tensor, places)


def _evenly(file: OpenFile, start: int, stop: int, samples: int) -> Iterator[bytes]:
    """Samples of bytes [start, stop) of a file."""
    return _samples(Tensor(file, "", "", (), start, stop), samples)


def _read(tensor: Tensor, places: Iterable[int]) -> Iterator[bytes]:
    """A sample of the tensor's bytes from each place."""
    for place in places:
        nbytes = min(_SAMPLE_BYTES, tensor.stop - tensor.start - place)
        yield tensor.file.read(nbytes, tensor.start + place)
