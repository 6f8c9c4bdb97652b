# SPDX-License-Identifier: Apache-2.0
"""The source's own bytes. The consumer converts them to its cache's format."""

import torch

from pd_connector.codec.base import check_bytes, check_plane
from pd_connector.codec.elements import as_dtype, convert, torch_dtype
from pd_connector.kv.coding import CODINGS, Elements, Part, Shape


class Raw:
    """Exact between caches with the same storage; otherwise equal to a conversion in place."""

    coding = CODINGS["raw"]

    def encode(
        self,
        part: Part,
        x: torch.Tensor,
        source: Elements,
        destination: Elements,
        out: torch.Tensor,
    ) -> None:
        check_plane(x, source)
        check_bytes(out, x.numel() * x.element_size())
        # Both sides as bytes, so that `out` may start at an odd address.
        out.view(*x.shape, -1).copy_(x.unsqueeze(-1).view(torch.uint8))

    def decode(
        self,
        part: Part,
        data: torch.Tensor,
        shape: Shape,
        source: Elements,
        destination: Elements,
    ) -> torch.Tensor:
        check_bytes(data, self.coding.coded_bytes(part, shape, source))
        stored = as_dtype(data, torch_dtype(source)).view(shape)
        if source.same_bits(destination):
            return stored
        out = torch.empty(shape, dtype=torch_dtype(destination), device=data.device)
        convert(stored, source, destination, out)
        return out


RAW = Raw()
