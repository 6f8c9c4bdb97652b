# SPDX-License-Identifier: Apache-2.0
"""Requests beside which no request of lower priority starts."""

from __future__ import annotations

from collections.abc import Collection


class Guards:
    """The guarded requests. A request stays guarded until its prefill has ended.

    A request is guarded if its class is owed and has no other request. Its steps then hold only its own work. Other
    classes lose the rest of these steps, while the class pays only for its own work. A class with several requests is
    not guarded, because full batches serve it sooner.
    """

    def __init__(self) -> None:
        self._priorities: dict[str, int] = {}  # by request id

    def __bool__(self) -> bool:
        return bool(self._priorities)

    def add(self, request_id: str, priority: int) -> None:
        self._priorities[request_id] = priority

    def drop(self, request_id: str) -> None:
        """The request was not started, or was preempted. If it is not guarded, nothing changes."""
        self._priorities.pop(request_id, None)

    def keep(self, prefilling: Collection[str]) -> None:
        """Drop all requests except these, whose prefill goes on."""
        kept = self._priorities
        self._priorities = {one: kept[one] for one in prefilling if one in kept}

    def shut_out(self, priority: int) -> bool:
        """Whether no request of this priority may start now."""
        return priority < max(self._priorities.values(), default=priority)
