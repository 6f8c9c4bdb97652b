# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, steered over its DevTools protocol. No package for that is needed, only the browser."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import pytest

NAMES = (
    "chromium",
    "chromium-headless-shell",
    "chromium-browser",
    "google-chrome",
    "chrome",
    "headless_shell",
)
_START_S = 60.0


def chromium() -> str:
    """The browser's path. Skips the test if none is installed."""
    named = os.environ.get("CHROMIUM", "")
    found = next((path for name in (named, *NAMES) if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(
            "no Chromium is installed (Debian: apt install chromium; or name one in CHROMIUM)"
        )
    return found


class Browser:
    """One page of a headless browser."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        """Errors of scripts, and what the page's policy has blocked."""

    async def __aenter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._process = await asyncio.create_subprocess_exec(
            self._program,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0"),
            *(f"--user-data-dir={self._folder.name}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            await self._connect()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._reading.cancel()
        await self._session.close()
        await self._end()

    async def _connect(self) -> None:
        told = Path(self._folder.name) / "DevToolsActivePort"
        async with asyncio.timeout(_START_S):
            while not (told.exists() and len(told.read_text().split()) == 2):
                assert self._process.returncode is None, "the browser has ended"
                await asyncio.sleep(0.1)
        port = told.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [one for one in await answer.json() if one["type"] == "page"]
        url = pages[0]["webSocketDebuggerUrl"]
        self._socket = await self._session.ws_connect(url, max_msg_size=1 << 28)
        self._reading = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        await self._process.wait()
        self._folder.cleanup()

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.complaints.append(told["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        told = await asyncio.wait_for(answer, _START_S)
        assert "error" not in told, told
        return dict(told["result"])

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Give the window a width in CSS pixels, and a theme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str, limit_s: float = 60.0) -> None:
        """Wait until the expression is true."""
        async with asyncio.timeout(limit_s):
            while not await self.value(expression):  # noqa: ASYNC110 - the page cannot tell
                await asyncio.sleep(0.1)

    async def picture(self, file: Path) -> None:
        """A PNG of the whole page."""
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(told["data"]))  # noqa: ASYNC240
