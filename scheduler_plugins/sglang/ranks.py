# SPDX-License-Identifier: Apache-2.0
"""One rank decides which requests a step starts, and sends the decision to the other ranks.

Every tensor-parallel rank of SGLang runs a scheduler of its own, and all schedulers must put the same requests into the
same step. If a rank chooses another request, it computes another shape, and the next collective operation never ends.
Measured costs and clocks differ between ranks, so only the first rank uses its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

_SIZE_BYTES = 8
_BUFFER_BYTES = 16 << 10
"""Bytes of one broadcast, about 400 requests. Longer decisions take a second broadcast."""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The requests that a step may start.

    `start`: ids of the requests to start, in this order; no other request may start. `looked_up`: ids whose prompts
    were looked up in the prefix cache, in that order. `step_tokens`: the most prompt tokens of the step; None: SGLang's
    limit. `reserved_tokens`: the part of these for requests that overtake the running prefill.
    """

    start: list[str] = []
    looked_up: list[str] = []
    step_tokens: int | None = None
    reserved_tokens: int = 0


class Ranks:
    """The ranks that must schedule the same requests.

    Args:
        group: their process group on the CPU.
        first: global number of the rank that decides.
        decides: whether this is the rank that decides.
        size: the number of ranks.
    """

    def __init__(self, group: Any, first: int, decides: bool, size: int) -> None:
        self._group = group
        self._first = first
        self.decides = decides
        self._size = size
        self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8)

    def agree(self, decide: Callable[[], Decision]) -> Decision:
        """The decision of the deciding rank. All ranks call this at the same point of a step."""
        if self._size == 1:
            return decide()
        if self.decides:
            decision = decide()
            self._send(msgspec.msgpack.encode(decision))
            return decision
        return msgspec.msgpack.decode(self._received(), type=Decision)

    def _send(self, text: bytes) -> None:
        head = len(text).to_bytes(_SIZE_BYTES, "little") + text
        sent = torch.frombuffer(bytearray(head[:_BUFFER_BYTES]), dtype=torch.uint8)
        self._buffer[: len(sent)] = sent
        dist.broadcast(self._buffer, src=self._first, group=self._group)
        if len(head) > _BUFFER_BYTES:
            rest = torch.frombuffer(bytearray(head[_BUFFER_BYTES:]), dtype=torch.uint8)
            dist.broadcast(rest, src=self._first, group=self._group)

    def _received(self) -> bytes:
        dist.broadcast(self._buffer, src=self._first, group=self._group)
        head: bytes = self._buffer.numpy().tobytes()
        size = int.from_bytes(head[:_SIZE_BYTES], "little")
        text = head[_SIZE_BYTES : _SIZE_BYTES + size]
        if missing := size - len(text):
            rest = torch.empty(missing, dtype=torch.uint8)
            dist.broadcast(rest, src=self._first, group=self._group)
            text += rest.numpy().tobytes()
        return text
