# SPDX-License-Identifier: Apache-2.0
"""KV between paged caches and payloads: gather, scatter and reshard, each in one launch.

The codec and the checksum are part of the same pass. `pd_kernels.payload` defines the
payload's format, and docs/codecs.md describes it byte by byte. One gather, in the order of the
calls: `planes.py` (which layers of a cache), `chunk_launch.py` (which tokens), `chunk_operator.py`
(kernel or reference), `gather.py` (the launch), `prologue.py` and one of the kernel files
(`copy_kernel.py`, `gather_*_kernel.py`).
"""

from pd_kernels.transfer.gather import gather_pages
from pd_kernels.transfer.planes import Planes, Stored
from pd_kernels.transfer.reshard import PayloadShape, Resharding, reshard
from pd_kernels.transfer.scatter import scatter_pages
from pd_kernels.transfer.sums import finish, new_sums, payload_sums

__all__ = [
    "PayloadShape",
    "Planes",
    "Resharding",
    "Stored",
    "finish",
    "gather_pages",
    "new_sums",
    "payload_sums",
    "reshard",
    "scatter_pages",
]
