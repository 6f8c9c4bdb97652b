# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt this engine cannot compute, and can only fetch.

Since 0.32 a vLLM decode engine takes images and the like without their content: with an encode engine and a prefill
engine before it, it needs their sizes only. Where it has to encode such a one, the whole engine ends.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.inputs import LEAST_ELEMENTS, elements, has_fractions, is_elsewhere

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("pd_connector.vllm")


class Uncomputable:
    """Used by the scheduler's thread only.

    Args:
        encoded_elsewhere: this engine gets the content from an encode engine: it can compute all prompts.
    """

    def __init__(self, *, encoded_elsewhere: bool) -> None:
        self._encoded_elsewhere = encoded_elsewhere
        self._needed: dict[str, int] = {}  # tokens that must be there before the rest is computed
        self._told: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._needed

    def add(self, request: "Request") -> None:
        """A request has come."""
        if self._encoded_elsewhere or not request.mm_features:
            return
        bare = [feature.mm_position for feature in request.mm_features if _is_bare(feature.data)]
        if bare:
            self._needed[request.request_id] = max(place.offset + place.length for place in bare)

    def waits(self, request_id: str, tokens: int) -> bool:
        """Whether a request must not be computed when so many of its tokens' KV are here or can be fetched.

        vLLM offers a connector no way to end one request; this one waits until its client gives up.
        """
        if tokens >= self._needed.get(request_id, 0):
            return False
        if request_id not in self._told:
            self._told.add(request_id)
            logger.warning(
                "request %s: it came without the content of its images, and its KV did not come from a "
                "prefill engine: it waits until its client gives up (config key on_failure: fail ends it)",
                request_id,
            )
        return True

    def discard(self, request_id: str) -> None:
        """A request has ended."""
        self._needed.pop(request_id, None)
        self._told.discard(request_id)


def _is_bare(data: Mapping[str, Any] | None) -> bool:
    """Whether processed data has sizes only, which are few whole numbers."""
    if is_elsewhere(data):
        return False
    return elements(data) < LEAST_ELEMENTS and not has_fractions(data)
