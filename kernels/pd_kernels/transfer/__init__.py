# SPDX-License-Identifier: Apache-2.0
"""Between paged caches and payloads: gather, scatter, reshard, each one launch, with the codec and
the checksum in the same pass.

`payload.py` says what a payload is; docs/codecs.md has it byte by byte.
"""

from pd_kernels.transfer.blocks import Blocks, Stored
from pd_kernels.transfer.gather import gather_pages
from pd_kernels.transfer.reshard import PayloadShape, Resharding, reshard
from pd_kernels.transfer.scatter import scatter_pages
from pd_kernels.transfer.sums import finish, new_sums, payload_sums

__all__ = [
    "Blocks",
    "PayloadShape",
    "Resharding",
    "Stored",
    "finish",
    "gather_pages",
    "new_sums",
    "payload_sums",
    "reshard",
    "scatter_pages",
]
