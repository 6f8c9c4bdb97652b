# SPDX-License-Identifier: Apache-2.0
"""The door to vLLM: `--scheduler-cls scheduler_plugins.vllm.PrefixAwareScheduler`,
`--middleware scheduler_plugins.vllm.AdmissionMiddleware` and `--middleware scheduler_plugins.vllm.PoolMiddleware`.

Names are resolved at first use. So the API server, which needs the middleware, does not import the scheduler. The
engine core does not import the middleware.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler_plugins.middleware.middleware import AdmissionMiddleware
    from scheduler_plugins.middleware.pool import PoolMiddleware
    from scheduler_plugins.vllm.scheduler import PrefixAwareScheduler

_HOMES = {
    "AdmissionMiddleware": "scheduler_plugins.middleware.middleware",
    "PoolMiddleware": "scheduler_plugins.middleware.pool",
    "PrefixAwareScheduler": "scheduler_plugins.vllm.scheduler",
}

__all__ = ["AdmissionMiddleware", "PoolMiddleware", "PrefixAwareScheduler"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
