# SPDX-License-Identifier: Apache-2.0
"""Only its operator can steer the router by its admin API, and no web page that the operator visits."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import stat
import sys
from pathlib import Path

import aiohttp
import pytest
from router_fakes import World, run

from scheduler_plugins.router.client.admin_auth import AdminAuth, token_file
from scheduler_plugins.router.endpoints.app_keys import ADMIN_AUTH
from scheduler_plugins.router.settings.config import RouterConfig

EVIL = "http://evil.example.org"
ENGINE = json.dumps({"url": "http://10.6.6.6:1", "role": "decode"})
JSON = "application/json"


async def ask(world: World, method: str, sent: str | None, **headers: str) -> int:
    """The admin API's status."""
    return (await told(world, method, sent, **headers))[0]


async def told(world: World, method: str, sent: str | None, **headers: str) -> tuple[int, str]:
    """The admin API's status and answer."""
    url = f"http://127.0.0.1:{world.server.admin_port}/engines"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=sent, headers=named) as answer,
    ):
        return answer.status, await answer.text()


def files(folder: Path) -> list[Path]:
    """All that is kept of tokens."""
    return list(folder.rglob("*.token*"))


@pytest.mark.parametrize("stray", ["\r\n", "\n", "\t", "\0", " "])
@pytest.mark.parametrize("at", [0, 11, -1])
def test_a_url_with_a_character_that_none_has_is_refused_by_name(stray: str, at: int) -> None:
    """Python's parser drops line breaks and tabs: another engine than the one that was named would join."""
    url = (
        f"http://127.0.0.1:8100{stray}"
        if at < 0
        else f"{stray}".join(split("http://127.0.0.1:8100", at))
    )

    async def scenario() -> None:
        async with World(admin_port=0) as world:
            count, token = len(world.engines), f"Bearer {world.app[ADMIN_AUTH].token}"
            for base in (url, url.replace("http://127.0.0.1", "dns+http://engines.example")):
                sent = json.dumps({"url": base, "role": "decode"})
                status, said = await told(
                    world, "POST", sent, Authorization=token, Content_Type=JSON
                )
                assert status == 400
                assert repr(stray[0])[1:-1] in said.replace("\\\\", "\\")
                assert len(world.engines) == count

    run(scenario())


def split(text: str, at: int) -> tuple[str, str]:
    return text[:at], text[at:]


def test_a_web_page_adds_no_engine() -> None:
    """The first is what any page can send with `fetch(..., {mode: "no-cors"})`, or with a form."""

    async def scenario() -> None:
        async with World(admin_port=0) as world:
            count, token = len(world.engines), f"Bearer {world.app[ADMIN_AUTH].token}"
            page = {"Origin": EVIL, "Content_Type": "text/plain"}
            assert await ask(world, "POST", ENGINE, **page) == 403
            # Each of the guards stands alone: the next ones have everything but what it asks for.
            right = {"Authorization": token, "Content_Type": JSON}
            assert await ask(world, "POST", ENGINE, **right, Origin=EVIL) == 403
            assert await ask(world, "POST", ENGINE, **right, Sec_Fetch_Site="cross-site") == 403
            assert await ask(world, "POST", ENGINE, **right, Host="evil.example.org:8001") == 403
            assert (
                await ask(world, "GET", None, Authorization=token, Host="evil.example.org") == 403
            )
            assert await ask(world, "POST", ENGINE, Content_Type=JSON) == 401
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
                sent = {"Authorization": token, "Content_Type": kind}
                assert await ask(world, "POST", ENGINE, **sent) == 415
            assert len(world.engines) == count
            assert await ask(world, "POST", ENGINE, **right, Host="localhost:8001") == 200
            assert len(world.engines) == count + 1, "the operator adds it"

    run(scenario())


def test_the_admin_api_wants_its_token() -> None:
    async def scenario() -> None:
        key = "0123456789abcdef0123-administrator"
        async with World(admin_port=0, admin_key=key) as world:
            assert await ask(world, "GET", None) == 401
            assert await ask(world, "GET", None, Authorization="Bearer wrong") == 401
            assert await ask(world, "GET", None, Authorization="Bearer ") == 401
            assert await ask(world, "GET", None, Authorization=f"Bearer {key}") == 200

    run(scenario())


def test_a_token_that_was_made_is_in_a_file_that_only_its_user_can_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = RouterConfig(prefill=("p:1",), decode=("d:1",), admin_port=0)
    operator = AdminAuth("")
    with operator.published(config, 8000):
        path = token_file(8000)
        assert path.read_text() == operator.token
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert f"http://127.0.0.1:8000/#token={operator.token}" in caplog.text
        with AdminAuth("").published(config, 8000):
            assert path.read_text() != operator.token, "each start has its own"
    assert not files(tmp_path)

    caplog.clear()
    with AdminAuth("0123456789abcdef0123-administrator").published(config, 8000):
        assert not files(tmp_path), "a key of the operator's is written nowhere"
    assert not caplog.text

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with operator.published(config, 8000):
        assert f"{operator.token} (kept in no file" in caplog.text, (
            "a router starts without a home, too"
        )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_command_prints_the_token_and_the_file_has_it(workers: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        options = ("--workers", workers, "--port", "0", "--admin-port", "0")
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scheduler_plugins.router", "--prefill", "127.0.0.1:1"),
            *("--decode", "127.0.0.1:1", *options),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        )
        assert router.stderr is not None
        said = ""
        while "Token of the admin API" not in said:
            line = await router.stderr.readline()
            assert line, said
            said += line.decode()
        (file,) = files(tmp_path)
        page = re.search(r"Live page: (\S+)/#token=(\S+)", said)
        admin = re.search(r"Admin API on (\S+)", said)
        assert page is not None
        assert admin is not None
        assert file.read_text() == page[2]
        token = {"Authorization": f"Bearer {page[2]}"}
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{admin[1]}/engines") as answer:
                assert answer.status == 401
            async with client.get(f"{admin[1]}/engines", headers=token) as answer:
                assert answer.status == 200
            async with client.get(f"{page[1]}/live", headers=token) as answer:
                assert answer.status == 200
        router.send_signal(signal.SIGTERM)
        await router.communicate()
        assert not files(tmp_path), "the token ends with the router"

    run(scenario())
