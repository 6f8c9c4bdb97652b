# SPDX-License-Identifier: Apache-2.0
"""Whether the codecs' compiled loops are usable. Without the loops torch computes the same bits, several times
slower."""

from types import ModuleType

import torch

from pd_connector.compiler import Compiler
from pd_connector.kv.coding import Elements

COMPILER = Compiler("pd_connector.codec.loops", "codecs")


def loops_for(x: torch.Tensor, elements: Elements) -> ModuleType | None:
    """The module `loops`, if its functions are compiled and take such a plane.

    Args:
        x: elements `[head, token, dim]`, or their codes.
        elements: how float elements are stored.
    """
    fits = elements.dtype == "bfloat16" and x.is_contiguous() and x.device.type == "cpu"
    return COMPILER.loops if fits else None
