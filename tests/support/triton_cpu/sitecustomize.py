# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's Model Runner V2 run on a CPU: a folder for the `PYTHONPATH` of an engine's processes.

vLLM takes Triton, which that runner needs, only if Triton has a backend for this machine. No Triton of PyPI has one for
CPUs, so one is named here that compiles nothing. With `TRITON_INTERPRET=1` kernels are interpreted. What the interpreter computes
for nothing is left out, half of its time: checks for overflow, whose results it drops; copies of all arguments to the host and back;
and a search through Triton's modules for each launch.
"""

import functools
import inspect
import types
from typing import Any

from triton.backends import backends
from triton.language.core import is_builtin
from triton.runtime import interpreter


class Driver:
    """Says that there is no device, so that Triton never takes it."""

    @staticmethod
    def is_active() -> bool:
        return False


@functools.cache
def builtins(package: Any) -> list[tuple[str, Any]]:
    """Triton's own functions in a module or a class, with their names."""
    return [(name, each) for name, each in inspect.getmembers(package) if is_builtin(each)]


def patch_builtins(package: Any, *others: Any) -> None:
    for name, function in builtins(package):
        if getattr(package, name) is function:
            interpreter._patch_attr(package, name, function, *others)


backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = lambda *_: None
interpreter.GridExecutor._init_args_hst = lambda _, args, named: (args, named)
interpreter.GridExecutor._restore_args_dev = lambda *_: None
interpreter._patch_builtin = patch_builtins
