# SPDX-License-Identifier: Apache-2.0
"""ucxx, imported so that other users of UCX in this process do not notice."""

import contextlib
import importlib
import os
from typing import Any

from pd_connector.errors import TransportError


def import_ucxx() -> tuple[Any, Any]:
    """ucxx's core, and what wraps its buffers. Raises TransportError if it is not installed."""
    before = set(os.environ)
    try:
        with contextlib.suppress(ModuleNotFoundError):  # a UCX of the system needs no help
            # ucxx does this only where librmm is installed, which host memory has no need of.
            importlib.import_module("libucx").load_library()
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise TransportError(
            f"transport ucx: {error}. Install it with `pip install 'pd-connector[ucx]'`, or "
            "take it out of the config key transports"
        ) from error
    finally:
        # The import sets UCX's variables, which other users of UCX in this process would inherit.
        for name in set(os.environ) - before:
            del os.environ[name]
    return libucxx, Array
