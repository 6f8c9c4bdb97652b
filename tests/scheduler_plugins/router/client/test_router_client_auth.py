# SPDX-License-Identifier: Apache-2.0
"""Which clients may speak to the router, encrypted or not, and names that stand for several engines."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from router_fakes import FAST, FakeEngine, World, run, until
from support.fake_kubernetes import FakeKubernetes

from scheduler_plugins.router.__main__ import main
from scheduler_plugins.router.client import listening, tls
from scheduler_plugins.router.client.client_auth import MOST_ID_CHARACTERS
from scheduler_plugins.router.endpoints.app_keys import ADMIN_AUTH, SHARED
from scheduler_plugins.router.engines import named as named_module
from scheduler_plugins.router.engines.engine import Role
from scheduler_plugins.router.engines.kubernetes import api as api_module
from scheduler_plugins.router.loop import AsyncioLoop, new_loop
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import SettingsFile


def certificate(folder: Path) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "router")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(cert_path), str(key_path)


def test_clients_need_the_key_and_engines_get_their_own() -> None:
    async def scenario() -> None:
        async with World(client_key="front", api_key="back") as world:
            body = {"model": "m", "prompt": "a"}
            for headers in ({}, {"Authorization": "Bearer back"}, {"Authorization": "front"}):
                assert (await world.post("/v1/completions", body, **headers)).status == 401
            assert world.d[0].bodies == []
            assert (await world.get("/v1/models")).status == 401
            assert (await world.get("/health")).status == 200
            ours = {"Authorization": "Bearer front"}
            assert (await world.post("/v1/completions", body, **ours)).status == 200
            for fake in (world.p[0], world.d[0]):
                assert fake.headers[0].getall("Authorization") == ["Bearer back"]
            anthropics = {"X-Api-Key": "front"}
            assert (await world.post("/v1/completions", body, **anthropics)).status == 200
            assert "X-Api-Key" not in world.d[0].headers[1]
            wrong = {"Authorization": "Bearer front, too", "X-Api-Key": "front"}
            assert (await world.post("/v1/completions", body, **wrong)).status == 401
        async with World(client_key="front") as world:
            assert (await world.post("/v1/completions", body, **ours)).status == 200
            assert "Authorization" not in world.d[0].headers[0], "engines do not learn our key"

    run(scenario())


@pytest.mark.parametrize("loop", [AsyncioLoop, new_loop], ids=["asyncio", "installed"])
def test_a_client_whose_tls_handshake_came_while_the_router_stood_still_is_answered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    monkeypatch.setattr(listening, "HEADERS_S", 1.0)
    cert, key = certificate(tmp_path)
    sent, tls = ssl.MemoryBIO(), ssl.create_default_context()
    with pytest.raises(ssl.SSLWantReadError):
        tls.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="127.0.0.1").do_handshake()

    async def scenario() -> None:
        async with World(tls_cert=cert, tls_key=key) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            await asyncio.sleep(0.2)  # the router waits for the handshake
            writer.write(sent.read())
            time.sleep(3.0)  # noqa: ASYNC251 - the whole process stands still
            assert (await reader.read(1)) == b"\x16", "its part of the handshake"
            writer.close()

    run(scenario(), loop)


def test_clients_and_engines_may_speak_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)

    async def scenario() -> None:
        served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        served.load_cert_chain(cert, key)
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d")]
        urls = []
        for fake in fakes:
            app = web.Application()
            fake.routes(app)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=served).start()
            fake._runner = runner
            urls.append(f"https://127.0.0.1:{runner.addresses[0][1]}")
        sides: dict[str, Any] = {"prefill": urls[:1], "decode": urls[1:]}
        trusting = RouterConfig(**sides, **FAST, engine_ca=cert, tls_cert=cert, tls_key=key)
        async with RouterServer(trusting) as server:
            context = ssl.create_default_context(cafile=cert)
            async with aiohttp.ClientSession() as session:
                url = f"https://127.0.0.1:{server.port}/v1/completions"
                asked = session.post(url, json={"model": "m", "prompt": "a"}, ssl=context)
                async with asked as response:
                    assert response.status == 200
                    assert (await response.json())["served_by"] == "d"
                with pytest.raises(aiohttp.ClientError):
                    await session.get(f"http://127.0.0.1:{server.port}/health")
        async with RouterServer(RouterConfig(**sides, **FAST)) as server:
            pool = server.app[SHARED].pool
            assert not pool.all_up(), "nobody has signed these certificates"
            for engine in pool.engines:
                assert "--engine-ca FILE names the CA to trust" in engine.reason
        plain = {
            side: [url.replace("https", "http") for url in found] for side, found in sides.items()
        }
        async with RouterServer(RouterConfig(**plain, **FAST)) as server:
            for engine in server.app[SHARED].pool.engines:
                assert "the engine's HTTP port (https:// perhaps)" in engine.reason
        for fake in fakes:
            await fake.die()

    run(scenario())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_cert": "/no/such"}, "tls_cert /no/such: no such file"),
        ({"tls_key": __file__}, "tls_key: is set without tls_cert"),
        ({"decode": ("dns+http://name",)}, "dns"),
        ({"decode": ("k8s+http://space:80",)}, "k8s"),
        ({"decode": ("dns+https://name:80",)}, "must look like"),
        ({"exchange": "tcp://0.0.0.0:1"}, "PD_ROUTER_KEY"),
        ({"fellows": ("10.0.0.1:3",)}, "must look like tcp"),
    ],
)
def test_a_wrong_door_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RouterConfig(**{"prefill": ("a:1",), "decode": ("b:1",), **settings})


def test_files_for_tls_that_cannot_be_used_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = certificate(tmp_path)
    sides: dict[str, Any] = {"prefill": ("a:1",), "decode": ("b:1",)}
    tls.check(RouterConfig(**sides, tls_cert=cert, tls_key=key, engine_ca=cert))
    tls.check(RouterConfig(**sides))
    pair = f"tls_cert {key} and tls_key {cert}: must be a certificate .* and its own private key"
    with pytest.raises(ValueError, match=pair):
        tls.check(RouterConfig(**sides, tls_cert=key, tls_key=cert))
    assert main(["--prefill", "a:1", "--decode", "b:1", "--engine-ca", key]) == 2
    assert f"engine_ca {key}: must be certificates" in capsys.readouterr().err


def test_a_dns_name_becomes_several_engines_and_is_followed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fake engines on one port at several addresses of loopback."""
    caplog.set_level("INFO")

    async def scenario() -> None:
        fakes = [FakeEngine(f"d{n}", f"engine-d{n}") for n in range(3)]
        prefill = FakeEngine("p", "engine-p")
        await prefill.start()
        port = 0
        for n, fake in enumerate(fakes, 1):
            app = web.Application()
            fake.routes(app)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, f"127.0.0.{n}", port).start()
            port = port or runner.addresses[0][1]
            fake._runner = runner
        known = ["127.0.0.1", "127.0.0.2"]
        loop = asyncio.get_running_loop()
        asked = loop.getaddrinfo

        async def resolve(host: Any, *args: Any, **named: Any) -> Any:
            if host != "decode.test":
                return await asked(host, *args, **named)
            if not known:
                raise socket.gaierror("no such name")
            return [(0, 0, 0, "", (one, 0)) for one in known]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        monkeypatch.setattr(named_module, "MEMBERS_S", 0.05)
        config = RouterConfig(
            prefill=(prefill.url,),
            decode=(f"dns+http://decode.test:{port}",),
            admin_port=0,
            **FAST,
        )
        async with RouterServer(config) as server:
            pool = server.app[SHARED].pool

            def up() -> set[str]:
                return {e.url for e in pool.all_up() if e.url != prefill.url and not e.draining}

            def at(*numbers: int) -> set[str]:
                return {f"http://127.0.0.{n}:{port}" for n in numbers}

            assert up() == at(1, 2)
            admin = f"http://127.0.0.1:{server.admin_port}/engines/role"
            moved = {"url": f"http://127.0.0.1:{port}", "role": "both"}
            token = {"Authorization": f"Bearer {server.app[ADMIN_AUTH].token}"}
            async with (
                aiohttp.ClientSession(headers=token) as client,
                client.post(admin, json=moved) as answer,
            ):
                assert answer.status == 200, "a name brings engines, and does not undo their roles"
                await asyncio.sleep(0.2)
                roles = {one.url: one.role for one in server.app[SHARED].pool.engines}
                assert roles[moved["url"]] is Role.BOTH
            known[:] = ["127.0.0.2", "127.0.0.3"]
            await until(lambda: up() == at(2, 3), "the name is followed")
            checks = fakes[1].health_checks
            known.clear()
            await until(lambda: fakes[1].health_checks > checks + 3, "the name server is away")
            assert up() == at(2, 3), "engines stay while nobody can tell"
            known[:] = ["127.0.0.3"]
            await until(lambda: up() == at(3), "the name is followed again")
        said = [line for line in caplog.messages if "the engines known before stay" in line]
        assert len(said) == 1, "it is said once, however often the name is looked up"
        assert [line for line in caplog.messages if "its engines can be looked up again" in line]
        for fake in (prefill, *fakes):
            await fake.die()

    run(scenario())


def test_engines_that_a_new_name_stands_for_are_there_before_the_others_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario() -> None:
        fakes = [FakeEngine("p", "engine-p"), FakeEngine("d")]
        for fake in fakes:
            await fake.start()
        loop, resolvable = asyncio.get_running_loop(), False
        asked = loop.getaddrinfo

        async def resolve(host: Any, *args: Any, **named: Any) -> Any:
            if host != "decode.test":
                return await asked(host, *args, **named)
            if not resolvable:
                raise socket.gaierror("no such name")
            return [(0, 0, 0, "", ("127.0.0.1", 0))]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        monkeypatch.setattr(named_module, "MEMBERS_S", 0.05)
        prefill = {"url": fakes[0].url, "role": "prefill"}
        path = tmp_path / "router.yaml"

        def write(url: str) -> None:
            path.write_text(
                yaml.safe_dump(
                    {"engines": [prefill, {"url": url, "role": "decode"}], "policy": "jsq"}
                )
            )

        write(fakes[1].url)
        settings = SettingsFile(path, {**FAST})
        async with RouterServer(settings.current, settings) as server:
            shared = server.app[SHARED]
            engine = shared.pool.up(Role.DECODE)[0]
            name = f"dns+http://decode.test:{fakes[1].port}"
            write(name)
            await until(lambda: shared.config.decode == (name,), "the file is followed")
            checks = fakes[1].health_checks
            await until(lambda: fakes[1].health_checks > checks + 3, "nobody knows the name")
            assert shared.pool.up(Role.DECODE) == [engine], "a name that nobody knows ends nothing"
            resolvable = True
            await until(
                lambda: not engine.draining and name in shared.pool._named._members, "it is known"
            )
            assert shared.pool.up(Role.DECODE) == [engine], "it is the same engine"
        for fake in fakes:
            await fake.die()

    run(scenario())


def test_the_pods_token_is_read_again_for_each_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kubernetes renews it."""
    monkeypatch.setattr(api_module, "ACCOUNT", tmp_path)

    async def scenario() -> None:
        async with FakeKubernetes() as server, aiohttp.ClientSession() as session:
            monkeypatch.setenv(api_module.API_VARIABLE, server.url)
            path = "/api/v1/namespaces/serving/pods"
            for token in ("first", "second"):
                server.token = token
                (tmp_path / "token").write_text(f"{token}\n")
                assert (await api_module.read(session, path))["kind"] == "PodList"
            server.token = "third"
            with pytest.raises(api_module.MembersError, match="answered 401: "):
                await api_module.read(session, path)

    run(scenario())


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/v1/models/m"])
def test_nothing_of_an_engine_is_told_without_the_clients_key(path: str) -> None:
    async def scenario() -> None:
        async with World(client_key="front") as world:
            assert (await world.get(path)).status == 401
            key = {"Authorization": "Bearer front"}
            async with world.client.get(path, headers=key) as answer:
                assert answer.status != 401

    run(scenario())


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("r\u2028WARNING forged", r"r\u2028WARNING forged"),
        ("r\u0085x\u202ey", r"r\u0085x\u202ey"),
        ("x" * 8000, "x" * MOST_ID_CHARACTERS),
        ("\u2028" * 8000, (r"\u2028" * MOST_ID_CHARACTERS)[:MOST_ID_CHARACTERS]),
        ("é日 1", "é日 1"),
    ],
)
def test_an_id_is_one_short_line_wherever_it_comes(given: str, shown: str) -> None:
    async def scenario() -> None:
        async with World() as world:
            raw = (
                b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nConnection: close\r\nContent-Length: 15\r\n"
                b'X-Request-Id: %b\r\n\r\n{"prompt": "a"}' % given.encode()[:8000]
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            writer.write(raw)
            assert b" 200 " in (await reader.read()).split(b"\r\n")[0]
            writer.close()
            assert world.d[0].headers[-1]["X-Request-Id"] == shown

    run(scenario())
