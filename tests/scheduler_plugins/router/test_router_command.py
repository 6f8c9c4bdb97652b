# SPDX-License-Identifier: Apache-2.0
"""The settings, and the command as a user starts it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from pd_connector.control.keys import new_key
from pd_connector.tools.launch.ports import Port
from scheduler_plugins.router.settings.config import RouterConfig

COMMAND = [sys.executable, "-m", "scheduler_plugins.router"]


def config(**settings: object) -> RouterConfig:
    return RouterConfig(**{"prefill": ("http://p:1",), "decode": ("http://d:1",), **settings})  # type: ignore[arg-type]


def test_urls_are_brought_to_one_form() -> None:
    urls = ("a:1", "http://b:2/", "http://c:3/v1", "https://d/base/")
    assert config(prefill=urls).prefill == (
        "http://a:1",
        "http://b:2",
        "http://c:3",
        "https://d/base",
    )


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"prefill": ()}, "prefill: no URL"),
        ({"decode": ("ftp://x",)}, "decode 'ftp://x'"),
        ({"decode": ("http://x:notaport",)}, "decode 'http://x:notaport'"),
        ({"decode": ("http://x:99999",)}, "decode 'http://x:99999'"),
        ({"decode": ("a:1", "http://a:1/")}, "given 2 times"),
        ({"decode": ("localhost:8123",), "port": 8123}, "is this router's own address"),
        ({"decode": ("10.0.0.1:81",), "host": "10.0.0.1", "port": 81}, "this router's own address"),
        ({"prefill": ("8100",)}, "prefill '8100': must look like http://host:port"),
        ({"prefill": ("http://a:1,http://b:2",)}, "name each URL by itself, without commas"),
        ({"prefill": ("http://fd00::1:8100",)}, "needs brackets, as in http://[::1]:8100"),
        ({"drain_timeout_s": 0}, "drain_timeout_s 0"),
        ({"idle_timeout_s": float("nan")}, "idle_timeout_s nan"),
        ({"attempts": 0}, "attempts 0"),
        ({"port": 70000}, "port 70000"),
        ({"admin_port": 70000}, "admin_port 70000"),
        ({"admin_port": -1}, "admin_port -1"),
        ({"workers": 257}, "workers 257: must be 256 at most"),
        ({"decode": ("http://x..y:1",)}, "decode 'http://x..y:1'"),
        ({"prefill": (f"{'a' * 64}.example:1",)}, "must look like http://host:port"),
        ({"decode": ("dns+http://x..y:1",)}, "must look like dns+http://NAME:PORT"),
        ({"exchange": "tcp://127.0.0.1"}, "exchange 'tcp://127.0.0.1': must look like"),
        ({"exchange": "tcp://127.0.0.1:99999"}, "exchange 'tcp://127.0.0.1:99999'"),
        ({"fellows": ("tcp://127.0.0.1:0",)}, "fellows 'tcp://127.0.0.1:0'"),
        (
            {"exchange": "tcp://127.0.0.1:91", "fellows": ("tcp://127.0.0.1:91",)},
            "fellows tcp://127.0.0.1:91: is this router's own exchange",
        ),
        ({"host": ""}, "host '': must be an address"),
        ({"otlp": "localhost:4318"}, "otlp 'localhost:4318': must look like http://"),
        ({"router_key": "a"}, "PD_ROUTER_KEY: a key of 1 characters"),
        ({"admin_key": "secret"}, "PD_ROUTER_ADMIN_KEY: a key of 6 characters"),
        ({"tokenizer": "/no/such/folder"}, "tokenizer /no/such/folder: must be a folder"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], names: str) -> None:
    with pytest.raises(ValueError, match=re.escape(names)):
        config(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"decode": ("http://u:PW@h:1",)},
        {"decode": ("http://:PW@h:1",)},
        {"decode": ("dns+http://u:PW@h:1",)},
        {"engine": ("k8s+http://PW@h:1/a=b",)},
        {"engine": ("pool+http://u:PW@ns/n",)},
        {"engine": ("k8s+http://h:1/a=b?token=PW",)},
        {"exchange": "tcp://u:PW@127.0.0.1:91"},
        {"fellows": ("tcp://u:PW@127.0.0.1:91",)},
        {"kv_events": {"http://u:PW@p:1": ("tcp://x:1", None)}},
        {"kv_events": {"http://p:1": ("tcp://u:PW@x:1", None)}},
        {"allowed_origins": ("http://u:PW@x/",)},
        {"otlp": "ftp://u:PW@x"},
    ],
)
def test_a_password_in_an_address_is_refused_and_not_shown(settings: dict[str, object]) -> None:
    """An engine's URL is its name in metrics, logs and on the live page."""
    with pytest.raises(ValueError, match="must look like") as raised:
        config(**settings)
    assert "PW" not in str(raised.value)


def test_wrong_options_end_with_a_message_and_status_2() -> None:
    ended = subprocess.run(
        [*COMMAND, "--prefill", "ftp://x", "--decode", "d:1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "prefill 'ftp://x': must look like http://host:port" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", "another program listens there"),
        ("192.0.2.77", "this machine has no such address"),
    ],
)
def test_an_exchange_that_cannot_be_bound_is_told_with_what_to_do(host: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://{host}:{taken.getsockname()[1]}"
        options = ["--decode", "d:1", "--prefill", "p:1", "--port", "0", "--exchange", address]
        environment = {**os.environ, "PD_ROUTER_KEY": new_key()}
        ended = subprocess.run(
            [*COMMAND, *options],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=120,
        )
    assert ended.returncode == 1
    assert f"{address} (exchange): {said}" in ended.stderr
    assert "--exchange" in ended.stderr


def test_an_engine_that_is_not_up_at_the_start_is_named_in_the_log_once() -> None:
    """A wrong port shows before the first request fails."""
    with Port() as nobody:
        url = f"http://127.0.0.1:{nobody.number}"
        settings = ["--decode", "127.0.0.1:1", "--health-interval-s", "0.1", "--port", "0"]
        command = [*COMMAND, "--prefill", url, *settings]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as router:
            assert router.stderr is not None
            told = [router.stderr.readline() for _ in range(4)]
            time.sleep(1.0)
            router.terminate()
            told += router.stderr.readlines()
    (line,) = [line for line in told if f"{url} (prefill) is not up yet: " in line]
    assert "refused" in line


def test_keys_are_not_in_the_help_and_not_in_what_the_settings_look_like() -> None:
    environment = {**os.environ, "PD_ROUTER_API_KEY": "hunter2"}
    ended = subprocess.run(
        [*COMMAND, "--help"], capture_output=True, text=True, check=True, env=environment
    )
    assert "--api-key" in ended.stdout
    assert "hunter2" not in ended.stdout
    keys = ("api_key", "admin_key", "client_key", "router_key")
    assert "hunter2" not in repr(
        config(**dict.fromkeys(keys, "hunter2 of some length that is enough"))
    )


def assert_ends(said: str, *options: str) -> None:
    """The router does not start with these options, and says why in a line."""
    engines = ("--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1")
    ended = subprocess.run(
        [*COMMAND, *engines, *options], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_ends_with_a_message_and_status_1(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = f"cannot listen on 127.0.0.1:{port}: another program listens there; take another port with --port"
        assert_ends(said, "--workers", workers, "--port", port)


def test_an_address_of_another_machine_ends_with_a_message() -> None:
    said = "cannot listen on 192.0.2.77:0: this machine has no such address"
    assert_ends(said, "--host", "192.0.2.77", "--port", "0")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_admin_apis_port_in_use_is_the_one_that_is_named(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ("--workers", workers, "--port", "0", "--admin-port", port)
        said = f"cannot listen on 127.0.0.1:{port} (admin API): another program listens there; take another port"
        assert_ends(f"{said} with --admin-port", *options)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_host_that_can_be_no_name_ends_with_a_message(workers: str) -> None:
    options = ("--workers", workers, "--port", "0", "--host", "x..y")
    assert_ends("cannot listen on x..y:0", *options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_command_listens_without_any_engine_alive_and_ends_on_a_signal(number: int) -> None:
    command = [*COMMAND, "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1", "--port", "0"]
    router = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert router.stderr is not None
        url = next(
            found.group()
            for line in router.stderr
            if (found := re.search(r"http://[\d.:]+$", line))
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/health", timeout=20)
        assert caught.value.code == 503
        assert json.load(caught.value)["status"] == "unavailable"
        router.send_signal(number)
        _, said = router.communicate(timeout=20)
        assert router.returncode == 0
        assert "Traceback" not in said
    finally:
        router.kill()
        router.communicate()
