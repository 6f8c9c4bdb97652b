# SPDX-License-Identifier: Apache-2.0
"""How numba compiles the codecs' loops. Only the module of loops imports this, because numba may be missing."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(*signature: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile for arguments of these types, without Python's lock, and keep the result for later processes
    where there is a place for it."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            made = numba.njit(numba.void(*signature), cache=True, **options)(function)
        except RuntimeError:  # no folder that can be written
            made = numba.njit(numba.void(*signature), **options)(function)
        result: Callable[..., None] = made
        return result

    return decorate
