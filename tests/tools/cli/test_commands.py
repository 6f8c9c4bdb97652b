# SPDX-License-Identifier: Apache-2.0
"""Where the commands of `pd-connector` come from."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.distributions import add_distribution
from typer.main import get_command

from pd_connector import __version__
from pd_connector.tools.cli.app import Commands, app

GROUP = "pd_connector.commands"
GREET = """
import typer

def greet(name: str) -> None:
    '''Say hello.'''
    print(f"hello {name}")

several = typer.Typer(help="Greetings.")

@several.command()
def goodbye() -> None:
    print("bye")

@several.callback()
def group() -> None:
    pass
"""


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`pd-connector`, with the packages in this folder installed beside it."""
    path = [str(folder)] if folder else []
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    command = [sys.executable, "-m", "pd_connector", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def listed(said: str) -> list[str]:
    """Names of the commands that a help lists, in their order."""
    rows = said.partition("Commands")[2].splitlines()
    return [row.split()[1] for row in rows if row.startswith("│ ") and row[2] != " "]


@pytest.fixture
def greeting(tmp_path: Path) -> Path:
    """Another package, with two commands that work and one that does not."""
    points = {"greet": "toy_cli:greet", "several": "toy_cli:several", "broken": "toy_broken:run"}
    modules = {"toy_cli": GREET, "toy_broken": "import nothing_like_this"}
    add_distribution(tmp_path, "toy-cli", modules, {GROUP: points})
    return tmp_path


def test_the_help_has_the_commands_of_all_our_packages_in_their_order() -> None:
    assert listed(run("--help").stdout) == [
        "demo",
        "check",
        "doctor",
        "pool",
        "audit",
        "bench",
        "profile",
        "key",
    ]


def test_another_package_adds_commands_behind_ours(greeting: Path) -> None:
    assert listed(run("--help", folder=greeting).stdout)[8:] == ["broken", "greet", "several"]
    assert run("greet", "world", folder=greeting).stdout == "hello world\n"
    assert run("several", "goodbye", folder=greeting).stdout == "bye\n"


def test_a_command_that_cannot_be_imported_says_why_and_spoils_no_other(greeting: Path) -> None:
    assert "nothing_like_this" in run("--help", folder=greeting).stdout
    failed = run("broken", "--option", "argument", folder=greeting)
    assert failed.returncode == 1
    assert "package 'toy-cli' (toy_broken:run)" in failed.stderr
    assert "nothing_like_this" in failed.stderr
    assert len(run("key", folder=greeting).stdout.strip()) == 64


def test_the_extra_that_a_command_lacks_is_named_in_its_help_too(tmp_path: Path) -> None:
    modules = {"toy_plot": "import aiohttp.nothing_like_this"}
    add_distribution(tmp_path, "toy-plot", modules, {GROUP: {"plot": "toy_plot:run"}})
    for said in (run("--help", folder=tmp_path).stdout, run("plot", folder=tmp_path).stderr):
        assert (
            "aiohttp.nothing_like_this is not installed: pip install 'pd-connector[router]'" in said
        )


def test_a_command_that_nobody_has_is_refused() -> None:
    refused = run("nothing")
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "pd-connector: command 'nothing' is not known",
        "pd-connector --help tells more",
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("docter",), "pd-connector: command 'docter' is not known; did you mean 'doctor'?"),
        (
            ("doctor", "--pear", "x"),
            "pd-connector doctor: option '--pear' is not known; did you mean '--peer'?",
        ),
        (
            ("bench", "handof"),
            "pd-connector bench: command 'handof' is not known; did you mean 'handoff'?",
        ),
        (
            ("profile", "--url", "x", "--longest-tokens", "1"),
            "pd-connector profile: Invalid value for '--longest-tokens': '1': should be greater than or equal to 64",
        ),
        (
            ("profile", "--repeats=many"),
            (
                "pd-connector profile: Invalid value for '--repeats': 'many': should be a valid integer, unable to parse "
                "string as an integer"
            ),
        ),
        (
            ("profile", "--repeats", "1", "--repeats", "many"),
            (
                "pd-connector profile: Invalid value for '--repeats': 'many': should be a valid integer, unable to parse "
                "string as an integer"
            ),
        ),
        (
            ("demo", "--transport", "rdma"),
            "pd-connector demo: Invalid value for '--transport': 'rdma' is not one of 'shm', 'tcp', 'nixl'.",
        ),
    ],
)
def test_a_typing_error_takes_two_lines_and_names_what_was_meant(
    typed: tuple[str, ...], said: str
) -> None:
    refused = run(*typed)
    assert refused.returncode == 2
    assert refused.stdout == ""
    first, second = refused.stderr.splitlines()
    assert first == said
    assert second == f"{said.partition(': ')[0]} --help tells more"


def test_a_reader_that_has_had_enough_ends_a_command_without_a_word() -> None:
    program = "import sys; from pd_connector.tools.cli.app import main; sys.exit(main())"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program, "key"],
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_is_not_utf_8_gets_words_and_no_traceback(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    said = run("check", "{}")
    assert said.returncode == 1
    assert "0 ok, 0 warn, 2 fail" in said.stdout
    assert not said.stderr


def test_a_full_disk_takes_one_line() -> None:
    program = "import sys; from pd_connector.tools.cli.app import main; sys.exit(main())"
    for arguments in (["key"], ["check", "{}"]):
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [sys.executable, "-c", program, *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
            )
        assert ended.returncode == 1
        assert len(ended.stderr.splitlines()) == 1
        assert b"No space left on device; make room there" in ended.stderr


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"pd-connector {__version__}\n"


def test_the_lines_of_the_help_are_those_of_the_commands() -> None:
    """The help imports no command, so it has its own copy of these lines."""
    group = get_command(app)
    with group.make_context("pd-connector", ["key"]) as ctx:
        for name, line in Commands.lines.items():
            assert group.get_command(ctx, name).get_short_help_str(200).rstrip(".") == line.rstrip(
                "."
            )


@pytest.mark.parametrize("command", ["pool ls", "bench wire", "profile"])
def test_a_help_breaks_its_lines_where_the_terminal_ends(command: str) -> None:
    """typer keeps the line breaks of a docstring: on a narrower page each second line had two words."""
    said = run(*command.split(), "--help").stdout.partition("Usage:")[2].partition("╭")[0]
    for paragraph in said.split("\n" + " " * 200 + "\n")[1:]:
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        for line, following in pairwise(lines):
            assert len(line) + len(following.split()[0]) > 190, said


def test_the_help_imports_no_command() -> None:
    program = (
        "import sys; from pd_connector.tools.cli.app import main; main(['--help']); "
        "print([name for name in sys.modules if name.startswith('pd_connector.tools.cli.')], file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stderr == "['pd_connector.tools.cli.app']\n"


def test_without_metadata_the_help_says_what_is_missing(tmp_path: Path) -> None:
    """As in a checkout that was never installed, or was installed before a command was added."""
    add_distribution(tmp_path, "pd-connector", {}, {"console_scripts": {}})
    failed = run("--help", folder=tmp_path)
    assert failed.returncode == 1
    assert "no command is installed" in failed.stderr
    assert "pip install" in failed.stderr
