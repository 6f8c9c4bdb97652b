# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter gets wrong or lacks, corrected: conversions between floats, the
instructions that kernels name, and, before Triton 3.9, fused multiply-adds, which it rounded twice.
What cannot be corrected is named: numpy 2.5. What it computes for nothing is left out, half of its time.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

FLOATS = {
    tl.float32: (torch.float32, np.uint32),
    tl.float16: (torch.float16, np.uint16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
}
BITS = {np.uint32: torch.int32, np.uint16: torch.int16, np.uint8: torch.uint8}

_theirs = interpreter._convert_float


def convert_float(data: Any, source: Any, destination: Any, rounding: Any) -> Any:
    """As a GPU does it: to nearest even; into FP8, what is too large becomes 448."""
    if source not in FLOATS or destination not in FLOATS:
        return _theirs(data, source, destination, rounding)
    (dtype, words), (wanted, wanted_words) = FLOATS[source], FLOATS[destination]
    bits = np.frombuffer(data.tobytes(), words).copy()
    value = torch.from_numpy(bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits)
    value = value.view(dtype).float()
    if wanted is torch.float8_e4m3fn:
        value = value.clamp(-448.0, 448.0)
    found = value.to(wanted).view(BITS[wanted_words]).numpy().view(wanted_words)
    return found.reshape(data.shape)


def fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    """In float64, which holds the product of two float32 exactly."""
    exact = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)


def inline_asm(_: Any, asm: str, _constraints: str, values: Any, *_others: Any) -> Any:
    """The PTX instructions that kernels name."""
    given = [each.data for each in values]
    if "cvt.rn.f16x2.e4m3x2" in asm:
        handles = [interpreter.TensorHandle(each, tl.float16) for each in _two_halves(asm, *given)]
    elif asm == "mov.b32 $0, 0x3C003C00;":
        handles = [interpreter.TensorHandle(np.ones(given[0].shape, np.float16), tl.float16)]
    else:
        words, dtype = _of_two(asm, *given)
        handles = [interpreter.TensorHandle(words.reshape(given[0].shape), dtype)]
    return SimpleNamespace(get_result=lambda place: handles[place])


def _two_halves(asm: str, words: Any) -> list[Any]:
    """The codes that the instruction's selector names, for each two words in a register. The selector's lowest
    digit is the byte that comes first."""
    selector = re.search(r"prmt\.b32 sorted, \$2, 0, 0x([0-7]{4});", asm)
    assert selector, asm
    order = [int(digit) for digit in reversed(selector[1])]
    codes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 4)[:, order]
    halves = convert_float(np.ascontiguousarray(codes), tl.float8e4nv, tl.float16, None)
    found = halves.view(np.float16).reshape(-1, 2, 2)
    return [found[:, part].reshape(words.shape) for part in range(2)]


def _of_two(asm: str, first: Any, second: Any) -> tuple[Any, Any]:
    """Results of instructions that take two operands."""
    if "max.u16x2" in asm:
        words = [
            np.ascontiguousarray(each, np.int32).ravel().view(np.uint16) for each in (first, second)
        ]
        if asm.startswith("and.b32 $0, $2, 0x7FFF7FFF;"):
            words[1] = words[1] & 0x7FFF
        return np.maximum(*words).view(np.int32), tl.int32
    if asm.split()[0] == "cvt.rn.satfinite.e4m3x2.f32":
        codes = [
            convert_float(np.float32(each), tl.float32, tl.float8e4nv, None).astype(np.uint16)
            for each in (first, second)
        ]
        return (codes[0] | codes[1] << 8).view(np.int16), tl.int16
    raise NotImplementedError(f"{asm}: say in kernel_traps.py what it computes")


_one_by_one = interpreter.ReduceOps.generic_reduce


def generic_reduce(self: Any, given: Any) -> Any:
    """Along an axis, all lines at once: Triton's own takes one element after another, seconds for
    a tile."""
    if len(given) > 1 or self.axis is None or self.keep_dims:
        return _one_by_one(self, given)
    (tensor,) = given
    found, *others = [
        self.to_tensor(each, tensor.dtype) for each in np.moveaxis(tensor.handle.data, self.axis, 0)
    ]
    for each in others:
        found = self.combine_fn.fn(found, each)
    return [found]


@functools.cache
def _builtins(package: Any) -> tuple[str, ...]:
    """Triton's own functions in a module or a class, by name."""
    members = inspect.getmembers(package)
    return tuple(name for name, member in members if tl.core.is_builtin(member))


_patch_each = interpreter._patch_builtin


def patch_builtins(package: Any, *others: Any) -> None:
    """Triton looks through its modules at each call of a function, though they are patched during the call
    of the kernel already."""
    names = _builtins(package)
    if names and tl.core.is_builtin(getattr(package, names[0])):
        _patch_each(package, *others)


def no_overflow_check(*_: Any) -> None:
    """Triton adds in 64 bits as well, and compares, and drops the result where kernels are not debugged."""


FMA_IS_WRONG = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)


@interpreter.InterpretedFunction
def _count(numbers, total):
    found = 0
    for _ in range(tl.load(numbers)):
        found += 1
    tl.store(total, found)


def count() -> None:
    """Run a kernel whose loop has a bound that it loads."""
    total = torch.zeros(1, dtype=torch.int32)
    _count[(1,)](torch.tensor([3], dtype=torch.int32), total)
    assert total.item() == 3


def problem(kernel: Callable[[], None] = count) -> str:
    """Why no kernel can be interpreted with the versions at hand; empty if they can.

    Before Triton 3.9 the interpreter turns arrays of one element into integers, which numpy 2.5
    refuses.
    """
    try:
        kernel()
    except TypeError as error:
        return (
            f"Triton {triton.__version__} cannot interpret kernels with numpy {np.__version__} ({error}): "
            "install numpy<2.5, or triton>=3.9"
        )
    return ""


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """Within, the interpreter computes as a GPU does."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(interpreter, "_convert_float", convert_float))
        patches.enter_context(mock.patch.object(interpreter, "_patch_builtin", patch_builtins))
        checks = "binary_op_sanitize_overflow_impl"
        semantic = interpreter.interpreter_semantic
        patches.enter_context(mock.patch.object(semantic, checks, no_overflow_check))
        builder = interpreter.InterpreterBuilder
        patches.enter_context(mock.patch.object(builder, "create_inline_asm", inline_asm))
        reduce = mock.patch.object(interpreter.ReduceOps, "generic_reduce", generic_reduce)
        patches.enter_context(reduce)
        if FMA_IS_WRONG:
            patches.enter_context(mock.patch.object(builder, "create_fma", fma))
        yield
