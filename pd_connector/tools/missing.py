# SPDX-License-Identifier: Apache-2.0
"""Says what to install if a module of another package is missing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

FAILED = 2
_OURS = ("pd_connector", "scheduler_plugins", "pd_kernels")
_ROUTER = ("aiohttp", "aiohappyeyeballs", "httptools", "prometheus_client", "yaml")
_EXTRAS = dict.fromkeys(_ROUTER, "router") | {"opentelemetry": "otel"}
"""The extra that installs a module."""


def what_to_install(module: str) -> str:
    """How to install this module, as an instruction."""
    return (
        brought_by_an_extra(module)
        or "use the environment of your engine (vLLM or SGLang), which brings it"
    )


def brought_by_an_extra(module: str) -> str:
    """How to install this module, if an extra contains it; else an empty string."""
    extra = _EXTRAS.get(module.partition(".")[0])
    return f"pip install 'pd-connector[{extra}]'" if extra else ""


@contextmanager
def named_if_missing() -> Iterator[None]:
    """If a module of another package is missing, end the program with one line instead of a traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if not module or module in _OURS:
            raise
        print(f"{module} is not installed: {what_to_install(module)}", file=sys.stderr)
        sys.exit(FAILED)
