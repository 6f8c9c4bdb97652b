# SPDX-License-Identifier: Apache-2.0
"""The radix cache of a decode engine, once a producer was found to serve other weights.

Samples let KV pass before all bytes of the weights are compared. So the radix cache may hold KV of such a producer, and
so may running requests, which SGLang caches at their end. SGLang cannot take pages out of the cache while requests use
them. Later requests therefore get a namespace of their own in it, and never find KV of before. SGLang evicts that first,
because it is not used.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

_GAUGE = "distrusted_producers"


class CacheNamespace:
    """The namespace of this rank's radix cache. Used by the scheduler's thread.

    Args:
        gauges: returns the agent's gauges.
        group: the ranks that must find the same in their caches; None: there is one rank. Every rank calls `enter`
            for the same requests in the same order.
    """

    def __init__(self, gauges: Callable[[], Mapping[str, float]], group: Any = None) -> None:
        self._gauges = gauges
        self._group = group
        self._distrusted = 0.0
        self._number = 0

    def enter(self, req: Any) -> None:
        """A request comes in. It finds KV of requests that have come since a producer was found unlike last."""
        distrusted = self._gauges().get(_GAUGE, 0.0)
        self._number += distrusted > self._distrusted
        self._distrusted = distrusted
        if self._group is not None:
            number = torch.tensor([self._number])
            torch.distributed.all_reduce(
                number, op=torch.distributed.ReduceOp.MAX, group=self._group
            )
            self._number = int(number)
        if self._number:  # as SGLang itself adds to a key
            parts = (req.extra_key, f"pd_connector={self._number}")
            req.extra_key = "|".join(part for part in parts if part)
