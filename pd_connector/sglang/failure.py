# SPDX-License-Identifier: Apache-2.0
"""Reports failures to SGLang, which ends the whole engine for an exception it does not expect."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol

from pd_connector.errors import HANDOFF_FAILED, Cause

logger = logging.getLogger("pd_connector.sglang")

P = ParamSpec("P")


class TransferError(Exception):
    """Why a request's KV did not come, or was not fetched. SGLang reads these three attributes.

    Without a failure of its own, this rank stopped because another rank failed.

    Args:
        handoff: whether this is a prefill engine that could compute the prompt, and only the handoff failed.
    """

    def __init__(
        self, room: int, failure: tuple[Cause, str] | None, *, handoff: bool = False
    ) -> None:
        self.bootstrap_room = room
        self.is_from_another_rank = failure is None
        cause, detail = failure or ("", "another rank failed")
        reason = f"{cause}: {detail}" if cause else detail
        self.failure_reason = f"{HANDOFF_FAILED}: {reason}" if handoff else reason
        super().__init__(self.failure_reason)


class _Failing(Protocol):
    def fail(self, cause: Cause, detail: str) -> None: ...


def contained(
    method: Callable[Concatenate[Any, P], None],
) -> Callable[Concatenate[Any, P], None]:
    """If the method raises, its request ends with cause `internal`, and the engine goes on."""

    @functools.wraps(method)
    def call(self: _Failing, /, *args: P.args, **options: P.kwargs) -> None:
        try:
            method(self, *args, **options)
        except Exception as error:
            logger.exception("%s failed: its request ends", method.__qualname__)
            self.fail(Cause.INTERNAL, repr(error))

    return call
