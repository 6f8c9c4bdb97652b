# SPDX-License-Identifier: Apache-2.0
"""What a reader copies from the documents is accepted: connector configs, files for router and schedulers, commands."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from pd_connector.config import KEY_VARIABLE
from pd_connector.control.keys import new_key
from pd_connector.tools.cli.app import app as pd_connector
from pd_connector.tools.cli.check import examine
from pd_connector.tools.cli.checks.finding import Status
from scheduler_plugins.commands import app as pd_router
from scheduler_plugins.qos.file import parse as scheduler_file
from scheduler_plugins.router.settings.settings_file import parse as router_file

ROOT = Path(__file__).parents[2]
DOCS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
TEXTS = {str(doc.relative_to(ROOT)): doc.read_text() for doc in sorted(DOCS)}

OBJECT = re.compile(
    r"(--[a-z-]*config|pd-connector check|PD_CONNECTOR_CONFIG=|-d) ?'([{\[].*?[}\]])'", re.S
)
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.M | re.S)
WRITTEN = re.compile(r"^( *)cat > (\S+) <<'(\w+)'\n(.*?)^ *\3$", re.M | re.S)
COMMAND = re.compile(
    r"^ *(?:\w+=\S+ )?((?:pd-connector|pd-router|python -m scheduler_plugins\.\w+) .*)$", re.M
)
GROUPS: dict[str, Any] = {
    "pd-connector": pd_connector,
    "pd-router": pd_router,
    "python -m scheduler_plugins.router": pd_router,
}
OF_SERVE = {"python -m scheduler_plugins.router"}
REFUSAL: Any = typer.BadParameter.__mro__[2]
"""Every error of use: click's, or that of typer's own click."""


def without(text: str, margin: str) -> str:
    """The text with this margin taken from each line."""
    return re.sub(f"^{margin}", "", text, flags=re.M)


def objects() -> Iterator[tuple[str, str, str]]:
    """Place, flag and text of every JSON object that a document gives to a program."""
    for doc, text in TEXTS.items():
        for flag, found in OBJECT.findall(text):
            if "\"'" not in found and "..." not in found:
                yield doc, flag, found


def wrong_objects(found: list[tuple[str, str, str]]) -> list[str]:
    """What is not JSON, or not a config that an engine would start with."""
    wrong = []
    for doc, flag, text in found:
        try:
            read = json.loads(text)
        except ValueError as error:
            wrong.append(f"{doc}: {text}: {error}")
            continue
        if flag == "PD_CONNECTOR_CONFIG=":
            wrong += [f"{doc}: {text}: {one}" for one in refused(extra=read)]
        elif flag in ("--kv-transfer-config", "pd-connector check"):
            wrong += [f"{doc}: {text}: {one}" for one in refused(**read)]
    return wrong


def refused(extra: Any = None, **config: Any) -> list[str]:
    """What `pd-connector check` says against a config, in an environment with a key."""
    given = config or {
        "kv_connector": "PDConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    found = examine(json.dumps(given), {KEY_VARIABLE: new_key()}).findings
    return [one.found for one in found if one.status is Status.FAIL]


def files() -> Iterator[tuple[str, str, str]]:
    """Document, name and text of every file that a reader writes."""
    for doc, text in TEXTS.items():
        for margin, name, _, content in WRITTEN.findall(text):
            yield doc, name, without(content, margin)
        for margin, kind, content in BLOCK.findall(text):
            if kind == "yaml":
                yield doc, kind, without(content, margin)


def read(text: str) -> None:
    """Read a file as the program does that it is for. Raises ValueError."""
    found = yaml.safe_load(text)
    if "engines" in found:
        router_file(text.encode(), {}, "router.yaml")
    elif "scheduler" in found:
        scheduler_file(text.encode())


def commands(text: str) -> Iterator[list[str]]:
    """Our commands in this text's blocks, as a shell cuts them."""
    blocks = [block for _, _, block in BLOCK.findall(text)]
    blocks += re.findall(r"^    .*$", text, re.M)
    for line in COMMAND.findall(re.sub(r"\\\n\s*", " ", "\n".join(blocks))):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        end = next((at for at, word in enumerate(words) if word[0] in ";&|<>#"), len(words))
        if not {"TRACE", "FOLDER"} & set(words):
            yield words[:end]


def refusal(words: list[str]) -> str:
    """What the program says to these words; empty if it takes them. Files that it reads are there."""
    for word in words:
        if re.fullmatch(r"[\w-]+\.(csv|jsonl|json|yaml|pem|md)", word):
            Path(word).touch()
        if word.endswith("-env"):
            Path(word, "bin").mkdir(parents=True, exist_ok=True)
    line = " ".join(words)
    name = max((one for one in GROUPS if line.startswith(f"{one} ")), key=len)
    command, context = get_command(GROUPS[name]), None
    rest = words[len(name.split()) :]
    if name in OF_SERVE:
        rest = ["serve", *rest]
    try:
        while True:
            context = command.make_context(name, rest, parent=context)
            if not hasattr(command, "resolve_command"):
                return ""
            left = [*context._protected_args, *context.args]
            name, command, rest = command.resolve_command(context, left)
    except typer.Exit:
        return ""  # --help, --version
    except REFUSAL as error:
        return f"{line}: {error.format_message()}"


def test_configs_in_documents_are_ones_that_an_engine_starts_with() -> None:
    found = list(objects())
    assert len(found) > 20
    assert not wrong_objects(found)


def test_a_config_with_a_wrong_key_is_noticed() -> None:
    flag = "--kv-transfer-config"
    text = '{"kv_connector": "PDConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"codek": 1}}'
    assert "did you mean 'codec'" in wrong_objects([("a page", flag, text)])[0]
    assert wrong_objects([("a page", flag, text.replace("}}", "}"))])


def test_files_in_documents_are_read_by_the_program_that_they_are_for() -> None:
    found = list(files())
    assert len(found) > 8
    for doc, name, text in found:
        try:
            read(text)
        except ValueError as error:
            pytest.fail(f"{doc}: {name}: {error}")


def test_a_file_with_a_wrong_key_is_noticed() -> None:
    for text in ("engines: []\npolcy: length", "scheduler: {polcy: fcfs}"):
        with pytest.raises(ValueError, match="did you mean"):
            read(text)


def test_commands_in_documents_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [(doc, words) for doc, text in TEXTS.items() for words in commands(text)]
    assert len(found) > 40
    assert not [f"{doc}: {said}" for doc, words in found if (said := refusal(words))]


def test_a_command_that_is_not_taken_is_noticed() -> None:
    (words,) = commands("    pd-router simulate --polcy length | tee out\n")
    assert "--polcy" in refusal(words)
