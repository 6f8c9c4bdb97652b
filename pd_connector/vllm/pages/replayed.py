# SPDX-License-Identifier: Apache-2.0
"""Windows that vLLM replays behind a prefix hit (DeepSeek V4.1): it computes the hit's last tokens once more, without the tokens
before them. KV of these tokens, and of all later tokens, differs slightly from that of a whole prefill. An audit that
compares the two would distrust an honest engine."""

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from pd_connector.vllm.pages.status import PageRule, Use

if TYPE_CHECKING:
    from vllm.v1.request import Request

WHOLE_EVERY = 16
"""On average one prompt for decode engines in this number is computed without a prefix cache: each audit needs one."""


def replayed(request: "Request") -> bool:
    """Whether a request's KV was computed after a replayed window."""
    return bool(request.replay_start > 0)


class ReplayedWindow(PageRule):
    """KV behind a replayed window is not compared."""

    cause = "replayed"
    forbids: ClassVar[Collection[Use]] = (Use.COMPARE,)

    def holds(self, request: "Request") -> bool:
        return replayed(request)
