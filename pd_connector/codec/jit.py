# SPDX-License-Identifier: Apache-2.0
"""How numba compiles the codecs' loops. Only the module of loops imports this, because numba may be missing."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(*signature: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile for arguments of these types. The function runs without Python's lock. The result is kept for later
    processes if a folder is writable."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            made = numba.njit(numba.void(*signature), cache=True, **options)(function)
        except RuntimeError:  # no writable folder
            made = numba.njit(numba.void(*signature), **options)(function)
        result: Callable[..., None] = made
        return result

    return decorate
