# SPDX-License-Identifier: Apache-2.0
"""Whether the codecs' compiled loops can be used. Without them torch computes the same bits, several times
more slowly."""

from types import ModuleType

import torch

from pd_connector.compiler import Compiler
from pd_connector.kv.coding import Elements

COMPILER = Compiler("pd_connector.codec.loops", "codecs")


def loops_for(x: torch.Tensor, elements: Elements) -> ModuleType | None:
    """The module `loops`, if its functions are compiled and take such a block.

    Args:
        x: elements `[head, token, dim]`, or their codes.
        elements: what float elements are stored as.
    """
    fits = elements.dtype == "bfloat16" and x.is_contiguous() and x.device.type == "cpu"
    return COMPILER.loops if fits else None
