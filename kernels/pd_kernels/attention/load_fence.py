# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The fence that Triton before 3.9 leaves out between asynchronous loads and products.

`cp.async` writes shared memory through the generic proxy, and `wgmma` reads it through the async
proxy. PTX wants `fence.proxy.async` between them.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

_LEFT_OUT = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))
_ASYNCHRONOUS = tl.constexpr(64)
"""Lines from which products are asynchronous on Hopper."""


@triton.jit
def show_loads(HEIGHT: tl.constexpr):
    """Let products of HEIGHT lines see what the loads before them have written.

    It stands directly before the first product of a turn, behind the transposition of its operand:
    the compiler waits for the loads at that transposition.
    """
    if _LEFT_OUT and HEIGHT >= _ASYNCHRONOUS and cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, $1;",
            "=r,r",
            [HEIGHT],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
