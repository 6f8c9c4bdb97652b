# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Score and mask functions, as in FlexAttention: small functions that are compiled into the kernel.

`score_mod(score, b, h, q_idx, kv_idx, args)` returns a new score. `mask_mod(b, h, q_idx, kv_idx,
args)` returns whether a token is seen. `b` is the sequence, `h` the query head; `q_idx` and `kv_idx`
are positions in the sequence, always of existing tokens. All four are int32 and broadcast to
`score`, float32 `[lines, tokens]`. `args` are the mod's tensors and numbers.

A function that uses only operators (`score - 0.1 * (q_idx - kv_idx)`) works for Triton and torch. A
function that calls `triton.language` (`tl.load(args[0] + h)`) needs a second one for torch, the
`reference`, where `args[0]` is the tensor.

Causality and sliding windows are arguments of `paged_decode`, because they decide which tiles are
read.
"""

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from pd_kernels.attention.online_softmax import LOG2E

_numbers = itertools.count()

REGISTRY: dict[int, "Mod"] = {}
"""All mods by their numbers. An operator of torch takes no functions, so it takes these numbers."""


@dataclass(frozen=True, eq=False)
class Mod:
    """A score or mask function with the values that it captures. `Mod.of` makes it.

    Attributes:
        kernel: the function for Triton.
        reference: the function for tensors of torch.
        args: tensors on the cache's device, and numbers.
        number: its key in REGISTRY.
        arity: number of the function's parameters, by which score and mask mods are told apart.
    """

    kernel: Any
    reference: Callable[..., torch.Tensor]
    args: tuple[Any, ...] = ()
    number: int = field(default_factory=lambda: next(_numbers))
    arity: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arity", len(inspect.signature(self.reference).parameters))
        REGISTRY[self.number] = self

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[torch.Tensor | float, ...] = (),
        reference: Callable[..., torch.Tensor] | None = None,
    ) -> "Mod":
        """Make a mod of a plain function of a module. What it needs beside its arguments comes by
        `args`: no lambda, no variable of an outer function, no global value.

        Make a mod once, not per step: the process keeps it for ever, and compiles a separate kernel
        for each function.

        Args:
            function: score or mask function; the module's docstring has the signatures.
            args: passed to it as `args`; tensors may change in place between calls.
            reference: the same function for torch, if `function` calls `triton.language`.

        Raises:
            ValueError: the function is none that a kernel can take; the message says why.

        Example:
            >>> from pd_kernels.attention import Mod
            >>> def nearer(score, b, h, q_idx, kv_idx, args):
            ...     return score - args[0] * (q_idx - kv_idx)
            >>> mod = Mod.of(nearer, args=(0.5,))
            >>> mod.reference(1.0, 0, 0, 10, 4, mod.args)
            -2.0
        """
        _check(function)
        return cls(_compiled(function), reference or function, args)


SCORE = ("score", "b", "h", "q_idx", "kv_idx", "args")
MASK = SCORE[1:]


def _check(function: Callable[..., Any]) -> None:
    """Raise ValueError for a function that Triton would refuse with a message about our kernel."""
    name = getattr(function, "__qualname__", repr(function))
    if not inspect.isfunction(function) or function.__name__ == "<lambda>":
        raise ValueError(f"mod {name}: must be a function with a `def` in a file, and not a lambda")
    count = len(inspect.signature(function).parameters)
    if count not in (len(SCORE), len(MASK)):
        raise ValueError(
            f"mod {name} with {count} parameters: a score mod has ({', '.join(SCORE)}), a mask mod "
            f"({', '.join(MASK)}). FlexAttention's have no `args`: add it"
        )
    outer = inspect.getclosurevars(function)
    # `outer.globals` also has names of attributes: `where` for `tl.where`.
    steps = dis.get_instructions(function)
    loaded = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    used = {each: value for each, value in outer.globals.items() if each in loaded}
    values = {**outer.nonlocals, **used}
    free = [each for each, value in values.items() if not _constant(value)]
    if free:
        raise ValueError(
            f"mod {name} uses {', '.join(free)} from outside: pass values and tensors by "
            "Mod.of(..., args=(...))"
        )


def _constant(value: object) -> bool:
    """Whether a compiled function may name a value of its module."""
    allowed = (types.ModuleType, tl.constexpr, triton.runtime.jit.KernelInterface)
    of_triton = str(getattr(value, "__module__", "")).startswith("triton.language")
    return isinstance(value, allowed) or of_triton


def check_mods(score: "Mod | None", mask: "Mod | None") -> None:
    """Raise ValueError if a mask mod is passed as a score mod, or the other way round."""
    for kind, mod, parameters in (("score_mod", score, SCORE), ("mask_mod", mask, MASK)):
        if mod is not None and mod.arity != len(parameters):
            raise ValueError(
                f"{kind}: its function must have the parameters ({', '.join(parameters)})"
            )


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


def _soft_cap(score, b, h, q_idx, kv_idx, args):
    return args[0] * (1 - 2 / (tl.exp2(score * args[1]) + 1))


def soft_cap(cap: float) -> Mod:
    """A score mod: `cap * tanh(score / cap)` (Gemma 2)."""

    def reference(score, b, h, q_idx, kv_idx, args):
        return cap * torch.tanh(score / cap)

    return Mod.of(_soft_cap, (float(cap), 2 * LOG2E / cap), reference)


def _alibi(score, b, h, q_idx, kv_idx, args):
    return score + tl.load(args[0] + h) * (kv_idx - q_idx)


def alibi(slopes: torch.Tensor) -> Mod:
    """A score mod: a penalty that grows with the distance (ALiBi, Press et al. 2021).

    `slopes` is float32 `[query heads]`, on the cache's device.
    """

    def reference(score, b, h, q_idx, kv_idx, args):
        return score + args[0][h] * (kv_idx - q_idx)

    return Mod.of(_alibi, (slopes,), reference)


def _document(b, h, q_idx, kv_idx, args):
    row = args[0] + b.to(tl.int64) * args[1]
    return tl.load(row + kv_idx) == tl.load(row + q_idx)


def document(ids: torch.Tensor) -> Mod:
    """A mask mod: a token sees its own document only.

    `ids` are integers `[batch, tokens]`, the document of each token, dense; `tokens` is at least
    the longest length.
    """

    def reference(b, h, q_idx, kv_idx, args):
        return args[0][b, kv_idx] == args[0][b, q_idx]

    return Mod.of(_document, (ids, ids.stride(0)), reference)
