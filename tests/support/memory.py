# SPDX-License-Identifier: Apache-2.0
"""Where malloc puts things."""

from __future__ import annotations

import torch

from pd_connector.memory.shared_cache import Span, allocation_of, private_memory

_ATTEMPTS = 50


def alone_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of 32 MiB and more, or its copy, in memory that malloc has mapped for it alone: it does
    so where nothing that was freed before is large enough."""
    tried = [tensor]
    for _ in range(_ATTEMPTS):
        try:
            allocation_of(Span(tried[-1].data_ptr(), tensor.nbytes), private_memory())
        except ValueError:
            tried.append(tensor.clone())  # beside the others, which are kept until one is right
        else:
            return tried[-1]
    raise AssertionError(f"malloc maps nothing of {tensor.nbytes} bytes by itself")


def shared_mappings() -> int:
    """Mappings of shared caches in this process, its own and those of peers."""
    with open("/proc/self/maps") as lines:
        return lines.read().count("pd-cache")
