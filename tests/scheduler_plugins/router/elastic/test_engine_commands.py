# SPDX-License-Identifier: Apache-2.0
"""The user's commands that start and stop engines: no shell reads them, none is waited for without end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.waits import until

from scheduler_plugins.router.elastic import command
from scheduler_plugins.router.elastic.command import CommandError, output_of
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.scaling import START, filled
from scheduler_plugins.router.settings.settings_file import SettingsError, parse

ENGINES = {"prefill": ("http://127.0.0.1:1",), "decode": ("http://127.0.0.1:2",)}
MOST = {"max_prefill": 4, "max_decode": 4}
TRUE = "/bin/true"


def output(*arguments: str, timeout_s: float = 60.0, **variables: str) -> str:
    return asyncio.run(output_of(START, arguments, variables, timeout_s))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("name", ["$(touch x)", "it's", "`id`", "a b; c", "{url}", "\n--help"])
def test_a_name_is_one_argument_whatever_characters_it_has(name: str) -> None:
    arguments, variables = filled(
        f"{sys.executable} -c 'import sys, os; print([sys.argv[1:], os.environ[\"PD_GROUP\"]])' --group={{group}} {{role}}",
        {"group": name, "role": "decode"},
    )
    assert eval(output(*arguments, **variables)) == [[f"--group={name}", "decode"], name]


def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "TERM_S", 0.2)
    pid, timeout_s, begun_s = tmp_path / "pid", 0.5, time.monotonic()
    while not pid.exists():  # a busy machine may take that long to begin a command
        timeout_s *= 2
        with pytest.raises(
            CommandError, match=f"had not ended after {timeout_s:g} s, and was kill"
        ) as failed:
            output(
                "/bin/sh",
                "-c",
                f"echo 'no GPU free' >&2; sleep 120 & echo $! > {pid}.new; mv {pid}.new {pid}; wait",
                timeout_s=timeout_s,
            )
    assert "no GPU free" in str(failed.value)
    assert time.monotonic() - begun_s < 60
    until(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists(), "the child is gone")


def test_a_command_of_another_user_that_cannot_be_killed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with sudo."""

    groups, kill = [], os.killpg

    def not_permitted(group: int, how: int) -> None:
        groups.append(group)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(command, "TERM_S", 0.1)
    monkeypatch.setattr(command.os, "killpg", not_permitted)
    with pytest.raises(CommandError, match="had not ended"):
        output("/bin/sleep", "60", timeout_s=0.2)
    kill(groups[0], signal.SIGKILL)


def test_what_a_command_leaves_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    """An engine inherits the output of the command that starts it, and keeps it open."""
    pid = tmp_path / "pid"
    begun_s = time.monotonic()
    text = output("/bin/sh", "-c", f"sleep 60 & echo $! > {pid}; echo http://127.0.0.1:7")
    os.kill(int(pid.read_text()), 9)
    assert text == "http://127.0.0.1:7\n"
    assert time.monotonic() - begun_s < 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            python("import sys; sys.exit('no GPU is free')"),
            r"ended with status 1 \(no GPU is free\)",
        ),
        (python("import os; os.kill(os.getpid(), 9)"), "ended with signal 9"),
        (["/no/such/program"], "cannot be run: No such file or directory: '/no/such/program'"),
        (["/etc"], "cannot be run: Permission denied"),
        ([sys.executable, "a\0b"], "cannot be run: embedded null byte"),
    ],
)
def test_a_command_that_fails_says_how(arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        output(*arguments)


def test_a_command_does_not_get_the_keys_of_operators_and_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PD_ROUTER_ADMIN_KEY", "PD_ROUTER_CLIENT_KEY", "PD_CONNECTOR_KEY"):
        monkeypatch.setenv(name, "secret")
    text = output(*python("import os; print(sorted(n for n in os.environ if n.endswith('KEY')))"))
    assert "PD_ROUTER" not in text
    assert "PD_CONNECTOR_KEY" in text, "the engine needs it"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "groups: default: max_prefill: must be given.*--max-prefill N"),
        ({"max_prefill": 4}, "groups: default: max_decode: must be given"),
        ({**MOST, "max_decode": -1}, "max_decode -1: must be 1 or more"),
        ({**MOST, "start_command": TRUE}, "start_command: is set without stop_command; set both"),
        ({**MOST, "start_command": "'", "stop_command": TRUE}, "no closing quotation; close"),
        (
            {**MOST, "start_command": " ", "stop_command": TRUE},
            "start_command ' ': must name a program",
        ),
        (
            {**MOST, "start_command": "/bin/true {url}", "stop_command": TRUE},
            r"start_command: \{url\} has no value; known are \{group\}, \{role\}",
        ),
        (
            {**MOST, "start_command": "sh -c 'run {role}'", "stop_command": TRUE},
            r'a shell would read .* write "\$PD_GROUP", "\$PD_ROLE" there instead',
        ),
        (
            {**MOST, "start_command": "{role}", "stop_command": TRUE},
            "the program must have a fixed name",
        ),
        (
            {**MOST, "start_command": "/no/such", "stop_command": TRUE},
            "start_command '/no/such': no such program.*chmod",
        ),
        (
            {"roles": "pressure", "start_command": TRUE, "stop_command": TRUE},
            "role policy pressure starts or stops no engine; set roles to slo",
        ),
        (
            {
                **MOST,
                "start_command": TRUE,
                "stop_command": TRUE,
                "fellows": ("tcp://10.0.0.2:9100",),
                "exchange": "tcp://0.0.0.0:9100",
                "router_key": "a-key-of-the-routers-that-is-long-enough",
            },
            "start_command: cannot be used with fellows.*run one router",
        ),
        ({**MOST, "engine_start_s": 901}, r"must be at most start_timeout_s \(900\).*raise"),
        ({"roles": "pressure", "days": "x"}, "days: only a role policy that starts engines"),
        ({**MOST, "days": "/no/such/folder/days.json"}, "no such folder; make it"),
        ({**MOST, "days": "/etc/passwd"}, "days /etc/passwd: was not written by the router"),
        ({**MOST, "engine_start_s": 0}, "engine_start_s 0: must be a number of seconds > 0"),
    ],
)
def test_settings_that_cannot_be_used_say_what_to_do(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(**{**ENGINES, "roles": "slo", **settings}).checked_here()  # type: ignore[arg-type]


FILE = """\
engines:
  - {url: "http://127.0.0.1:1", role: prefill}
  - {url: "http://127.0.0.1:2", role: decode}
roles: slo
start_command: [/bin/echo, "it's {role}", "$(x)"]
stop_command: /bin/true {url}
limits: {engine_start_s: 90, start_timeout_s: 300}
groups:
  default: {max_prefill: 8, max_decode: 2%s}
"""


def test_the_file_has_all_of_it() -> None:
    config = parse((FILE % "").encode(), {}, "router.yaml")
    assert filled(config.start_command, {"group": "g", "role": "decode"})[0] == [
        "/bin/echo",
        "it's decode",
        "$(x)",
    ]
    assert (config.engine_start_s, config.start_timeout_s) == (90, 300)
    assert config.bounds("default").max_prefill == 8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (", min_decode: 3", "max_decode 2: is below min_decode 3; raise it"),
        (", unit_prefill: 3", "unit_prefill 3, unit_decode 0: give both, or neither"),
        (", unit_prefill: 9, unit_decode: 1", "no number of units of 9 prefill and 1 decode"),
        (", max_decod: 3", "max_decod"),
    ],
)
def test_bounds_that_cannot_be_kept_are_named(more: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse((FILE % more).encode(), {}, "router.yaml")
