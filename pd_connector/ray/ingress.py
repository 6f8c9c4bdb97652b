# SPDX-License-Identifier: Apache-2.0
"""The deployment that clients call."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress

logger = logging.getLogger("ray.serve")


class SecondChanceIngress(OpenAiIngress):
    """Ray's ingress, with a retry. If a decode replica dies before it has answered anything, its request is sent once
    more: to another replica, or to the replica that Serve starts in its place.

    There is one retry only: a request that kills its replicas would otherwise kill all of them.
    """

    async def _get_response(
        self, *, body: Any, call_method: str, raw_request: Any = None
    ) -> AsyncGenerator[Any, None]:
        ask = super()._get_response
        begun = False
        try:
            answer = ask(body=body, call_method=call_method, raw_request=raw_request)
            async with contextlib.aclosing(answer):
                async for chunk in answer:
                    begun = True
                    yield chunk
            return
        except RayActorError as error:
            if begun:  # the client has part of an answer that no other replica can continue
                raise
            logger.warning(
                "the replica died before it answered; its request goes to another: %s", error
            )
        again = ask(body=body, call_method=call_method, raw_request=raw_request)
        async with contextlib.aclosing(again):
            async for chunk in again:
                yield chunk
