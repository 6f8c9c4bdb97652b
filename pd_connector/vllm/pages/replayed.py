# SPDX-License-Identifier: Apache-2.0
"""Windows that vLLM replays behind a prefix hit (DeepSeek V4.1): it computes the hit's last tokens once more, without the tokens
before them. Their KV, and that of all tokens behind them, is near what a whole prefill computes, but not the same: compared
with it, it would make an honest engine a wrong one."""

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from pd_connector.vllm.pages.status import PageRule, Use

if TYPE_CHECKING:
    from vllm.v1.request import Request

WHOLE_EVERY = 16
"""On average one prompt for decode engines in this number is computed without a prefix cache: each audit needs one."""


def replayed(request: "Request") -> bool:
    """Whether a request's KV stands behind a window that was replayed."""
    return bool(request.replay_start > 0)


class ReplayedWindow(PageRule):
    """KV behind a replayed window is not compared."""

    cause = "replayed"
    forbids: ClassVar[Collection[Use]] = (Use.COMPARE,)

    def holds(self, request: "Request") -> bool:
        return replayed(request)
