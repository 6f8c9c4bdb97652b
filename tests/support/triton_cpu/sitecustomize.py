# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's Model Runner V2 run on a CPU: a folder for the `PYTHONPATH` of an engine's processes.

vLLM takes Triton, which that runner needs, only if Triton has a backend for this machine. No Triton of PyPI has one for
CPUs, so one is named here that compiles nothing. With `TRITON_INTERPRET=1` kernels are interpreted.
"""

import types

from triton.backends import backends


class Driver:
    """Says that there is no device, so that Triton never takes it."""

    @staticmethod
    def is_active() -> bool:
        return False


backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
