# SPDX-License-Identifier: Apache-2.0
"""Which tensors lie where in a file of weights, by its header: safetensors and GGUF."""

import json
import math
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from pd_connector.kv.checkpoint_files import OpenFile

_MOST_HEADER_BYTES = 100 << 20
_GGUF_MAGIC = b"GGUF"
_GGUF_ALIGNMENT = 32
_GGUF_NUMBERS = "BbHhIif?"  # struct formats of value types 0 to 7
_GGUF_LONG_NUMBERS = {10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_LIST = 8, 9
_MOST_COUNT = 1 << 24


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
    """The tensors in a safetensors file. Raises ValueError if it is no such file, or is cut off."""
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
    found = []
    try:
        for name, told in header.items():
            if name == "__metadata__":
                continue
            begin, end = told["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(
                    f"{file.name}: tensor {name} is outside the file, which is truncated"
                )
            shape = tuple(int(extent) for extent in told["shape"])
            place = 8 + length + begin, 8 + length + end
            found.append(Tensor(file, name, str(told["dtype"]), shape, *place))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file.name}: the safetensors header lacks {error!r}") from None
    return found


def gguf(file: OpenFile) -> list[Tensor]:
    """The tensors in a GGUF file of version 2 or later, little-endian; none where it is another file.

    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    size = file.size
    try:
        with file.stream() as stream:
            if stream.read(4) != _GGUF_MAGIC or not 2 <= _number(stream, "I") < 1 << 16:
                return []
            tensors, values = _count(stream), _count(stream)
            told = dict(_values(stream, values))
            infos = [_info(stream) for _ in range(tensors)]
            alignment = int(told.get("general.alignment") or _GGUF_ALIGNMENT)
            base = -(-stream.tell() // alignment) * alignment
    except (struct.error, ValueError, OverflowError):
        return []
    # Sizes are those of quantised blocks: a tensor ends where the next one begins.
    ends = dict(zip(*_neighbours([offset for *_, offset in infos], size - base), strict=True))
    return [
        Tensor(file, name, str(dtype), shape, base + offset, base + ends[offset])
        for name, shape, dtype, offset in infos
        if offset <= ends[offset]
    ]


def _neighbours(offsets: list[int], end: int) -> tuple[list[int], list[int]]:
    ordered = sorted(set(offsets))
    return ordered, [min(after, end) for after in (*ordered[1:], end)] if ordered else []


def _number(stream: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))[0]


def _count(stream: BinaryIO) -> int:
    found = int(_number(stream, "Q"))
    if found > _MOST_COUNT:
        raise ValueError(f"{found} of something")
    return found


def _text(stream: BinaryIO) -> str:
    return stream.read(_count(stream)).decode(errors="replace")


def _values(stream: BinaryIO, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        yield _text(stream), _value(stream, _number(stream, "I"))


def _value(stream: BinaryIO, kind: int) -> Any:
    """A value of the file's metadata; None for a list, which nothing here needs."""
    if kind == _GGUF_STRING:
        return _text(stream)
    if kind == _GGUF_LIST:
        inner, count = _number(stream, "I"), _count(stream)
        if inner in (_GGUF_STRING, _GGUF_LIST):
            for _ in range(count):
                _value(stream, inner)
        else:
            stream.seek(count * struct.calcsize(f"<{_form(inner)}"), 1)
        return None
    return _number(stream, _form(kind))


def _form(kind: int) -> str:
    if kind < len(_GGUF_NUMBERS):
        return _GGUF_NUMBERS[kind]
    if kind not in _GGUF_LONG_NUMBERS:
        raise ValueError(f"value type {kind}")
    return _GGUF_LONG_NUMBERS[kind]


def _info(stream: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of a tensor."""
    name, dims = _text(stream), _number(stream, "I")
    shape = tuple(_number(stream, "Q") for _ in range(min(dims, 8)))
    if dims > len(shape) or math.prod(shape) < 0:
        raise ValueError(f"{dims} dims")
    return name, shape, _number(stream, "I"), _number(stream, "Q")
