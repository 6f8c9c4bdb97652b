# SPDX-License-Identifier: Apache-2.0
"""What every codec does with one plane."""

from typing import Protocol

import torch

from pd_connector.codec.elements import torch_dtype
from pd_connector.kv.coding import Coding, Elements, Part, Shape
from pd_kernels.payload import padded


class Codec(Protocol):
    """One way to code a plane of elements as bytes. `coding` has its name, sizes and error bound."""

    coding: Coding

    def encode(
        self,
        part: Part,
        x: torch.Tensor,
        source: Elements,
        destination: Elements,
        out: torch.Tensor,
    ) -> None:
        """Code a plane; every byte of `out` is written.

        Args:
            part: K or V.
            x: `[head, token, dim]` of `source`'s dtype, any strides.
            source: how the producer's cache stores `x`.
            destination: how the consumer's cache will store it.
            out: uint8 `[coded_bytes]`, dense, on the device of `x`; any alignment.

        Raises:
            ValueError: a tensor does not match its description above, or the codec cannot take `source`.
        """
        ...

    def decode(
        self,
        part: Part,
        data: torch.Tensor,
        shape: Shape,
        source: Elements,
        destination: Elements,
    ) -> torch.Tensor:
        """The plane that `encode` coded with the same `part`, `source` and `destination`.

        Args:
            part: K or V.
            data: uint8 `[coded_bytes]`, dense, any alignment; only read.
            shape: heads, tokens, dims.
            source: how the producer's cache stores the plane.
            destination: how the consumer's cache stores it.

        Returns:
            `shape` of `destination`'s dtype, dense. May share memory with `data`.

        Raises:
            ValueError: `data` does not match its description above.
        """
        ...


def check_plane(x: torch.Tensor, source: Elements) -> None:
    """Raise ValueError unless `x` is a plane of `source`'s dtype."""
    if x.dim() != 3 or x.dtype != torch_dtype(source):
        raise ValueError(
            f"plane of shape {tuple(x.shape)} and {x.dtype}: must be [head, token, dim] of "
            f"{torch_dtype(source)}, as the cache of {source.dtype} that it comes from"
        )


def check_bytes(data: torch.Tensor, nbytes: int) -> None:
    """Raise ValueError unless `data` is a dense row of `nbytes` bytes."""
    if data.dtype != torch.uint8 or data.shape != (nbytes,) or not data.is_contiguous():
        raise ValueError(
            f"coded plane of shape {tuple(data.shape)} and {data.dtype}: must be {nbytes} dense "
            f"bytes of uint8, see coded_bytes()"
        )


def split(data: torch.Tensor, scale_bytes: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and the codes of a coded plane of `nbytes` bytes, as views of its bytes."""
    check_bytes(data, nbytes)
    return data[:scale_bytes], data[padded(scale_bytes) :]


def put_scales(out: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the scales of a plane, and the zeros after them."""
    raw = scales.contiguous().reshape(-1).view(torch.uint8)
    out[: len(raw)].copy_(raw)
    out[len(raw) : padded(len(raw))].zero_()


def get_scales(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The scales of a plane, copied from their bytes, which may start at an odd address."""
    return data.clone().view(dtype).view(shape)
