# SPDX-License-Identifier: Apache-2.0
"""Wakes an idle engine, from any thread: it makes a step if the connector has asked for one (`has_pending_push_work`).

vLLM's engine core checks this only between steps. Without a request it waits for a message. A connector that always
reports work gets its steps, but then neither a pause nor a stop comes to its end.
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.wrap_once import with_subclasses, wrap_once

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

_cores: "weakref.WeakSet[EngineCoreProc]" = weakref.WeakSet()


def watch() -> None:
    """Note the engine cores of this process, so that they can be woken. Harmless to repeat."""
    from vllm.v1.engine.core import EngineCoreProc

    for core in with_subclasses(EngineCoreProc):
        wrap_once(core, "run_busy_loop", _runs)


def wake() -> None:
    """Wake the engine cores of this process."""
    from vllm.v1.engine import EngineCoreRequestType

    for core in list(_cores):
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def _runs(original: Callable[[Any], None], core: Any) -> None:
    _cores.add(core)
    original(core)
