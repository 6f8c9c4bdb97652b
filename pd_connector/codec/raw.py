# SPDX-License-Identifier: Apache-2.0
"""The source's own bytes; the consumer converts them to what its cache stores."""

import torch

from pd_connector.codec.base import Part, Shape, check_block, check_bytes
from pd_connector.codec.elements import Elements, as_dtype, convert
from pd_connector.kv.payload import block_bytes


class Raw:
    """Exact between caches that store alike; else exactly what converting in place would give."""

    name = "raw"
    error_bound = 0.0

    def coded_bytes(self, part: Part, shape: Shape, source: Elements) -> int:
        return block_bytes(self.name, part is Part.KEY, *shape, source.nbytes).total

    def encode(
        self,
        part: Part,
        x: torch.Tensor,
        source: Elements,
        destination: Elements,
        out: torch.Tensor,
    ) -> None:
        check_block(x, source)
        check_bytes(out, x.numel() * x.element_size())
        # As bytes on both sides, so that `out` may lie at an odd address.
        out.view(*x.shape, -1).copy_(x.unsqueeze(-1).view(torch.uint8))

    def decode(
        self,
        part: Part,
        data: torch.Tensor,
        shape: Shape,
        source: Elements,
        destination: Elements,
    ) -> torch.Tensor:
        check_bytes(data, self.coded_bytes(part, shape, source))
        stored = as_dtype(data, source.torch_dtype).view(shape)
        if source.same_bits(destination):
            return stored
        out = torch.empty(shape, dtype=destination.torch_dtype, device=data.device)
        convert(stored, source, destination, out)
        return out
