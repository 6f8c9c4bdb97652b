# SPDX-License-Identifier: Apache-2.0
"""Pods that are followed, and what was heard of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from scheduler_plugins.router.engines.kubernetes.pods import Pods
from scheduler_plugins.router.settings.members import checked_name

NAME = "k8s+http://serving:8200/app=vllm"


class Followed:
    """What was heard of one name."""

    def __init__(self) -> None:
        self.urls: list[str] | None = None
        self.problems: list[str] = []

    def told(self, *addresses: str) -> bool:
        return self.urls == [f"http://{address}" for address in addresses]

    def tell(self, urls: Any) -> None:
        self.urls = list(urls)


@asynccontextmanager
async def following(url: str = NAME) -> AsyncIterator[Followed]:
    heard = Followed()
    async with aiohttp.ClientSession() as session:
        pods = Pods(checked_name("decode", url), session, heard.tell, heard.problems.append)
        task = asyncio.create_task(pods.follow())
        try:
            yield heard
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
