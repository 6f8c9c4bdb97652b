# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt this engine cannot compute, only fetch.

Since 0.32 a vLLM decode engine accepts images and other inputs without their content: behind an encode engine and a
prefill engine, it needs only their sizes. If it has to encode such an input, the whole engine ends.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pd_connector.vllm.identity.inputs import LEAST_ELEMENTS, elements, has_fractions, is_elsewhere

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("pd_connector.vllm")


class Uncomputable:
    """Used by the scheduler's thread only.

    Args:
        encoded_elsewhere: an encode engine sends the content, so this engine can compute all prompts.
    """

    def __init__(self, *, encoded_elsewhere: bool) -> None:
        self._encoded_elsewhere = encoded_elsewhere
        self._needed: dict[str, int] = {}  # tokens whose KV must be here first
        self._logged: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._needed

    def add(self, request: "Request") -> None:
        """A request has come."""
        if self._encoded_elsewhere or not request.mm_features:
            return
        bare = [feature.mm_position for feature in request.mm_features if _is_bare(feature.data)]
        if bare:
            self._needed[request.request_id] = max(place.offset + place.length for place in bare)
            _read_caches(request)

    def waits(self, request_id: str, tokens: int) -> bool:
        """Whether a request must wait, because KV of only `tokens` tokens is here or can be fetched, and it needs more.

        vLLM offers a connector no way to end one request, so this request waits until its client gives up.
        """
        if tokens >= self._needed.get(request_id, 0):
            return False
        if request_id not in self._logged:
            self._logged.add(request_id)
            logger.warning(
                "request %s: it came without the content of its images, and no prefill engine sent its KV: "
                "it waits until its client gives up (config key on_failure: fail ends it)",
                request_id,
            )
        return True

    def discard(self, request_id: str) -> None:
        """A request has ended."""
        self._needed.pop(request_id, None)
        self._logged.discard(request_id)


def _read_caches(request: "Request") -> None:
    """Remove `prompt_logprobs`, so that vLLM asks the connector for KV of the prompt.

    With `prompt_logprobs` vLLM ignores the connector's answer, and computes the prompt. Fetched tokens have no log
    probabilities (the memory would be uninitialised), so the answer has none. The parameters are copied first, because
    they can be the client's own object.
    """
    if not request.skip_reading_prefix_cache:
        return
    request.skip_reading_prefix_cache = False
    if request.sampling_params is not None:
        params = request.sampling_params = request.sampling_params.clone()
        params.prompt_logprobs = params.prompt_logprob_token_ids = None


def _is_bare(data: Mapping[str, Any] | None) -> bool:
    """Whether processed data of an input has only sizes (a few whole numbers), not its content."""
    if is_elsewhere(data):
        return False
    return elements(data) < LEAST_ELEMENTS and not has_fractions(data)
