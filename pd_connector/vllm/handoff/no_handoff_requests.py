# SPDX-License-Identifier: Apache-2.0
"""Prompts whose requests ask for no handoff. Behind a proxy that does not speak to PDConnector, every engine computes
its own prompts, and nothing fails: without this message the operator would not notice."""

import logging
import time
from collections.abc import Callable

from pd_connector.remedies import UNASKED
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.vllm")

PAUSE_S = 60.0
"""Time between two log lines, in seconds."""
NO_PARAMS, NOTHING_ASKED = "no_params", "nothing_asked"
"""Causes: no `kv_transfer_params` at all, or some that ask neither to keep KV nor to fetch it."""


class NoHandoffRequests:
    """Used by vLLM's scheduler only.

    Args:
        page_tokens: a prompt of this length or shorter has no KV to move.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        page_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._telemetry = telemetry
        self._page_tokens = page_tokens
        self._clock = clock
        self._used = False
        self._logged = float("-inf")
        self._unlogged = 0

    def used(self) -> None:
        """A request has asked for a handoff, so the proxy speaks to PDConnector. Nothing is logged from now on."""
        self._used = True

    def note(self, prompt_tokens: int, params: object) -> None:
        """Note a request that asks for no handoff.

        Args:
            params: its `kv_transfer_params`.
        """
        if prompt_tokens <= self._page_tokens:
            return
        cause = NOTHING_ASKED if params else NO_PARAMS
        self._telemetry.count("unmoved_prompts", cause=cause)
        if self._used:
            return
        self._unlogged += 1
        now = self._clock()
        if now - self._logged < PAUSE_S:
            return
        self._logged = now
        logger.warning(
            "no KV has moved here yet: no request has asked for it. The last of %d prompts of more than %d tokens (%s) "
            "is computed here: %s",
            *(self._unlogged, self._page_tokens, cause, UNASKED[cause]),
        )
        self._unlogged = 0
