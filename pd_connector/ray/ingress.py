# SPDX-License-Identifier: Apache-2.0
"""The deployment that clients talk to."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress

logger = logging.getLogger("ray.serve")


class SecondChanceIngress(OpenAiIngress):
    """Ray's ingress. A request whose decode replica dies before it has answered anything is sent once
    more, to another replica or to the one that Serve starts in its place.

    It is sent once more only: a request that ends the replicas it meets would end all of them.
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
            if begun:  # its client has a part of an answer that nobody can go on with
                raise
            logger.warning("the replica died before it answered, asking another: %s", error)
        again = ask(body=body, call_method=call_method, raw_request=raw_request)
        async with contextlib.aclosing(again):
            async for chunk in again:
                yield chunk
