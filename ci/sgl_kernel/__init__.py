# SPDX-License-Identifier: Apache-2.0
"""What SGLang imports as `sgl_kernel` on a machine without a GPU, where that package cannot be installed.

It has every name and does nothing: an engine that reaches for a kernel stops with the kernel's name.
The engine's CPU paths that tests take (`--attention-backend torch_native`) need none.
"""

from typing import Any, NoReturn

__version__ = "0.4.10"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"kernel {name}: sgl_kernel is a stand-in here (ci/sgl_kernel)")

    return missing
