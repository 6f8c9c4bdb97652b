# SPDX-License-Identifier: Apache-2.0
"""Which tensors lie where in a safetensors file, by its header."""

import json
import struct
from typing import NamedTuple

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
