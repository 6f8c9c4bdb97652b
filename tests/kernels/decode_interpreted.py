# SPDX-License-Identifier: Apache-2.0
"""Imports `pd_kernels.attention` so that its kernels are interpreted, and corrects what the
interpreter gets wrong beyond `kernel_traps`: products of bfloat16 matrices, which it takes for
integers.
"""

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

_theirs = interpreter.InterpreterBuilder.create_dot


def _single(handle: Any) -> Any:
    """A bfloat16 handle, whose data are 16 bits each, as float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    words = handle.data.view(np.uint16).astype(np.uint32) << 16
    return interpreter.TensorHandle(words.view(np.float32), tl.float32)


def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
    """As a GPU does it: products of bfloat16 are exact in float32."""
    return _theirs(self, _single(a), _single(b), *others)


@contextlib.contextmanager
def dots_mended() -> Iterator[None]:
    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


def _import() -> None:
    module = sys.modules.get("pd_kernels.attention.plan_kernel")
    if module is not None:
        if isinstance(module.partition_rows, InterpretedFunction):
            return
        for name in [name for name in sys.modules if name.startswith("pd_kernels.attention")]:
            del sys.modules[name]
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        importlib.import_module("pd_kernels.attention")


_import()
# Mods are compiled when they are made.
importlib.import_module("pd_kernels.attention.mods")._compiled = functools.cache(
    InterpretedFunction
)
