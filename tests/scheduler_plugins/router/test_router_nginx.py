# SPDX-License-Identifier: Apache-2.0
"""nginx before the router, as docs/router.md configures it, and with its own defaults."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from router_fakes import World, run, stream, until
from support.free_ports import free_ports

PAGE = (Path(__file__).parents[3] / "docs" / "router.md").read_text()
DOCUMENTED = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)[0]
DEFAULTS = """
upstream pd_router { server 127.0.0.1:8000; }
server { listen 80; location / { proxy_pass http://pd_router; } }
"""
GAP_S = 0.3


pytestmark = pytest.mark.skipif(not shutil.which("nginx"), reason="no nginx is installed (Debian)")


@contextmanager
def nginx(servers: str, router: int, port: int, folder: Path) -> Iterator[None]:
    servers = servers.replace(":8000;", f":{router};").replace(
        "listen 80;", f"listen 127.0.0.1:{port};"
    )
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temp = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {temp}\n{servers} }}"
    )
    command = ["nginx", "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("servers", [DOCUMENTED, DEFAULTS], ids=["documented", "defaults"])
def test_events_come_at_once_and_a_client_that_leaves_is_noticed(
    servers: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with World(1, 1) as world:
            world.d[0].behave = stream(3, gap_s=GAP_S)
            (port,) = free_ports(1)
            url = f"http://127.0.0.1:{port}"
            with nginx(servers, world.port, port, tmp_path):
                while True:
                    try:
                        async with world.client.get(f"{url}/ping") as response:
                            assert response.status == 200
                            break
                    except OSError:
                        await asyncio.sleep(0.05)
                clock = asyncio.get_running_loop().time
                body = {"model": "m", "prompt": "a", "stream": True}
                async with world.client.post(f"{url}/v1/completions", json=body) as response:
                    came = [clock() async for line in response.content if line.startswith(b"data:")]
                assert len(came) == 4
                assert came[2] - came[0] > GAP_S / 2, "together they would come at the end"
                world.d[0].behave = stream(3, then="hang")
                async with world.client.post(f"{url}/v1/completions", json=body) as response:
                    await response.content.readline()
                    response.close()
                await until(
                    lambda: not any(engine.open_requests for engine in world.engines),
                    "the engine's request has ended",
                )

    run(scenario())
