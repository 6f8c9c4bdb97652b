# SPDX-License-Identifier: Apache-2.0
"""A proxy that only passes requests and answers on. It shows the cost of the HTTP library alone on this machine."""

from __future__ import annotations

import asyncio
import sys

import aiohttp
from aiohttp import web

from scheduler_plugins.router.loop import run


async def _serve(engine: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def hand_on(request: web.Request) -> web.StreamResponse:
            body, headers = await request.read(), {"Content-Type": "application/json"}
            async with session.post(engine + request.path, data=body, headers=headers) as answer:
                returned = {"Content-Type": answer.headers["Content-Type"]}
                response = web.StreamResponse(status=answer.status, headers=returned)
                await response.prepare(request)
                while chunk := await answer.content.readany():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application()
        app.router.add_post("/{path:.*}", hand_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        print(f"Running on http://{host}:{port}", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    run(_serve(sys.argv[1]))
