# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What a score becomes and which tokens count: small functions that are compiled into the kernel.

As FlexAttention's: `score_mod(score, b, h, q_idx, kv_idx, args)` gives a new score and
`mask_mod(b, h, q_idx, kv_idx, args)` says what is seen. `b` is the sequence, `h` the query head, `q_idx`
and `kv_idx` are positions in the sequence, those of real tokens always; all of them are int32 that
broadcast to `score`, float32 `[lines, tokens]`. `args` are the mod's tensors and numbers.

A function of operators only serves Triton and torch alike:

    def nearer(score, b, h, q_idx, kv_idx, args):
        return score - 0.1 * (q_idx - kv_idx)

    paged_decode(..., score_mod=Mod.of(nearer))

One that calls `triton.language` (`tl.load(args[0] + h)`) takes its twin in torch as `reference`, where
`args[0]` is the tensor. Causality and sliding windows are arguments of `paged_decode`, because they
decide which tiles are read.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from pd_kernels.attention.online_softmax import LOG2E

_numbers = itertools.count()
REGISTRY: dict[int, "Mod"] = {}
"""Of all mods: operators take no functions, so `torch.compile` passes numbers."""


@dataclass(frozen=True, eq=False)
class Mod:
    """A score or mask function with what it captures.

    Attributes:
        kernel: the function as Triton compiles it.
        reference: the same for tensors.
        args: tensors on the cache's device, and numbers.
        number: in REGISTRY.
    """

    kernel: Any
    reference: Callable[..., torch.Tensor]
    args: tuple[Any, ...] = ()
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        REGISTRY[self.number] = self

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[torch.Tensor | float, ...] = (),
        reference: Callable[..., torch.Tensor] | None = None,
    ) -> "Mod":
        """A mod of a plain function, whose source Triton must be able to find (no lambda).

        Make it once, not per step: it is kept for the life of the process, and each function is
        compiled into a kernel of its own. `args` may change in place between calls.

        Args:
            reference: the same in torch, where `function` is not.
        """
        return cls(_compiled(function), reference or function, args)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


def _soft_cap(score, b, h, q_idx, kv_idx, args):
    return args[0] * (1 - 2 / (tl.exp2(score * args[1]) + 1))


def soft_cap(cap: float) -> Mod:
    """`cap * tanh(score / cap)` (Gemma 2)."""

    def reference(score, b, h, q_idx, kv_idx, args):
        return cap * torch.tanh(score / cap)

    return Mod.of(_soft_cap, (float(cap), 2 * LOG2E / cap), reference)


def _alibi(score, b, h, q_idx, kv_idx, args):
    return score + tl.load(args[0] + h) * (kv_idx - q_idx)


def alibi(slopes: torch.Tensor) -> Mod:
    """A penalty by distance, `slopes` float32 `[query heads]` (Press et al. 2021)."""

    def reference(score, b, h, q_idx, kv_idx, args):
        return score + args[0][h] * (kv_idx - q_idx)

    return Mod.of(_alibi, (slopes,), reference)


def _document(b, h, q_idx, kv_idx, args):
    row = args[0] + b.to(tl.int64) * args[1]
    return tl.load(row + kv_idx) == tl.load(row + q_idx)


def document(ids: torch.Tensor) -> Mod:
    """A token sees its own document: `ids` integers `[batch, tokens]`, dense, tokens >= all lengths."""

    def reference(b, h, q_idx, kv_idx, args):
        return args[0][b, kv_idx] == args[0][b, q_idx]

    return Mod.of(_document, (ids, ids.stride(0)), reference)
