# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists, and what exists is named in them: options, settings, variables, metrics, causes."""

import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.surface import OWN_VARIABLE, metric_names, variables
from support.surface import options as options_of
from typer.main import get_command

from chaos.__main__ import app as chaos
from pd_connector.agent import metrics as connector_metrics
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.tools.cli.app import app as pd_connector
from scheduler_plugins.commands import app as pd_router
from scheduler_plugins.router.settings.config import RouterConfig

ROOT = Path(__file__).parents[2]
DOCS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
TEXTS = {str(doc.relative_to(ROOT)): doc.read_text() for doc in DOCS}
ALL = "\n".join(TEXTS.values())
CONFIGURATION = TEXTS["docs/configuration.md"]
ROUTER = TEXTS["docs/router.md"]

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
COMMAND = re.compile(r"(?:^|[\s`(])((?:pd-connector|pd-router|python3? -m [\w.]+) [^`\n]*)", re.M)
OTHERS = {
    *("--no-deps", "--only-binary", "--platform", "--python-version", "--target"),  # pip
    *("--cacert", "--retry", "--retry-connrefused"),  # curl
    *(
        "--pd-disaggregation",
        "--ipc",
        "--shm-size",
        "--tool",
    ),  # SGLang's router, Docker, compute-sanitizer
    *("--kv-connector", "--moriio-write-mode"),  # llm-d's routing sidecar
    *("--from-literal", "--set", "--reuse-values"),  # kubectl, helm
    *("--eviction-policy", "--l1-size-gb", "--l2-adapter"),  # LMCache's server
}
"""Options of programs that nobody needs for these tests."""


def rows(text: str, heading: str) -> Iterator[list[str]]:
    """Cells of the tables of a section."""
    section = re.split(rf"^#+ {heading}$", text, maxsplit=1, flags=re.M)[1]
    for line in re.split(r"^## ", section, maxsplit=1, flags=re.M)[0].splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def words(cell: str) -> list[str]:
    """What a cell has between backticks, without values and labels."""
    return [re.split(r"[ {=]", word)[0] for word in re.findall(r"`([^`]+)`", cell)]


def commands() -> dict[str, set[str]]:
    """The options of our commands, by how they are called."""
    router = dict(options_of(get_command(pd_router), "pd-router"))
    return {
        **router,
        "pd-router": router["pd-router"] | router["pd-router serve"],
        **dict(options_of(get_command(pd_connector), "pd-connector")),
        **dict(options_of(get_command(chaos), "python -m chaos")),
        "python -m scheduler_plugins.router": router["pd-router serve"],
    }


def written_in(*folders: str) -> set[str]:
    """Options in the source of programs whose import would take long."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return {one for file in files for one in re.findall(r'"(--[a-z][a-z0-9-]+)"', file.read_text())}


def of_engines() -> set[str]:
    """Options of vLLM's and SGLang's servers, from their source; skips where one of them is missing."""
    spec = importlib.util.find_spec("vllm")
    sglang = next(
        (ROOT / ".venv-sglang").glob("lib/*/site-packages/sglang/srt/server_args.py"), None
    )
    if spec is None or spec.origin is None or sglang is None:
        pytest.skip("needs vLLM, and SGLang in .venv-sglang")
    vllm = Path(spec.origin).parent
    files = [vllm / "engine/arg_utils.py", *vllm.glob("config/*.py"), *vllm.rglob("cli_args.py")]
    found = set[str]()
    for file in [*files, sglang, *sglang.parent.glob("arg_groups/**/*.py")]:
        text = file.read_text()
        found |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', text))
        found |= {
            f"--{name.replace('_', '-')}" for name in re.findall(r"^    ([a-z]\w+)\s*:", text, re.M)
        }
    return found


def wrong_options(text: str, known: dict[str, set[str]]) -> list[str]:
    """Options that a command in this text does not have."""
    found = []
    for line in COMMAND.findall(re.sub(r"\\\n\s*", " ", text)):
        line = re.split(r" [|&>#] | &&|;", f"{line} ")[0].replace("python3 ", "python ")
        names = [name for name in known if f"{line} ".startswith(f"{name} ")]
        if names:
            name = max(names, key=len)
            found += [
                f"{name} {one}"
                for one in OPTION.findall(line)
                if one not in known[name] | {"--help"}
            ]
    return found


def test_options_that_documents_name_exist() -> None:
    known = set[str]().union(
        *commands().values(),
        written_in(
            "ci/gpu_run",
            "ci/bench/pd_bench/kernels",
            "tests/emulator",
            "tests/fuzz",
            "tests/kernels",
        ),
        OTHERS,
        of_engines(),
    )
    named = {(doc, option) for doc, text in TEXTS.items() for option in OPTION.findall(text)}
    assert len(named) > 100
    assert not sorted(one for one in named if one[1] not in known)


def test_programs_that_documents_name_exist() -> None:
    folders = ("pd_connector", "scheduler_plugins", "kernels", "ci", "tests", "docs", "examples")
    there = [str(file) for folder in folders for file in (ROOT / folder).rglob("*.py")]
    named = {
        (doc, name) for doc, text in TEXTS.items() for name in re.findall(r"`([\w/-]+\.py)`", text)
    }
    gone = [
        (doc, name) for doc, name in named if not any(file.endswith(f"/{name}") for file in there)
    ]
    assert sorted(gone) == [("docs/ray.md", "pd_server.py")], "Ray's own, and none of ours"


def test_commands_in_documents_have_the_options_that_they_are_given() -> None:
    known = commands()
    assert not [
        f"{doc}: {one}" for doc, text in TEXTS.items() for one in wrong_options(text, known)
    ]


def test_an_option_of_another_command_is_noticed() -> None:
    line = "    pd-router serve --prefill URL \\\n        --no-overlap | tee --append"
    assert wrong_options(line, commands()) == ["pd-router serve --no-overlap"]


def test_every_option_is_named_in_a_document() -> None:
    named = set(OPTION.findall(ALL))
    assert not [
        f"{name} {option}"
        for name, options in commands().items()
        for option in sorted(options)
        if option.startswith("--")
        and option not in named | {"--help"}
        and not name.startswith(
            ("pd-connector bench core", "pd-connector bench scheduler")
        )  # their help is enough
    ]


def differing(table: Iterable[tuple[list[str], str]], defaults: dict[str, Any]) -> list[str]:
    """Settings whose default a table tells otherwise; those without one, or with one in words, are passed by."""
    found = []
    for names, cell in table:
        told = [one.strip().strip('`"') for one in cell.split(",")]
        for name, text in zip(names, told, strict=False):
            wanted = defaults[name]
            wanted = str(wanted).lower() if isinstance(wanted, bool) else wanted
            wanted = f"{wanted:g}" if isinstance(wanted, float) else str(wanted)
            if len(told) == len(names) and re.fullmatch(r"[a-z\d_.]+", text) and text != wanted:
                found.append(f"{name}: {text}, is {wanted}")
    return found


def test_the_connectors_settings_are_those_of_the_table() -> None:
    table = [(words(row[0]), row[1]) for row in rows(CONFIGURATION, "The connector")]
    assert sorted(name for names, _ in table for name in names) == sorted(Config.__struct_fields__)
    defaults = {name: getattr(Config(), name) for name in Config.__struct_fields__}
    assert not differing(table, {**defaults, "transports": "auto"})
    assert differing([(["lease_s"], "31")], defaults) == ["lease_s: 31, is 30"]


def test_the_routers_options_are_those_of_the_table() -> None:
    table = [(words(row[0]), row[1]) for row in rows(ROUTER, "Options")]
    told = {name for names, _ in table for name in names}
    assert told == commands()["pd-router serve"]
    defaults = {f"--{one.name.replace('_', '-')}": one.default for one in fields(RouterConfig)}
    numbers = [(names, cell) for names, cell in table if re.fullmatch(r"[\d., ]+", cell)]
    assert len(numbers) > 10
    assert not differing(numbers, defaults)


def test_variables_are_those_of_the_documents() -> None:
    folders = ("pd_connector", "scheduler_plugins", "kernels/pd_kernels", "ci", "docs")
    assert set(OWN_VARIABLE.findall(ALL)) == variables(folders)


def test_metrics_are_those_of_the_documents() -> None:
    known = metric_names()
    own = {word for row in rows(CONFIGURATION, "Metrics") for word in words(row[0])}
    assert {connector_metrics.PREFIX + name for name in own - {connector_metrics.PREFIX}} == {
        name for name in known if name.startswith(connector_metrics.PREFIX)
    }
    full = set(re.findall(r"\bpd_(?:connector|router|scheduler):\w*\w", ALL))
    assert not sorted(full - set(known))
    assert not sorted(name for name in known if name.partition(":")[2] not in ALL)


def test_every_cause_is_in_the_table_of_what_to_do() -> None:
    """`remedies.remedy` sends operators there."""
    table = [words(row[0]) for row in rows(CONFIGURATION, "When something goes wrong")]
    told = [name for names in table[1:] for name in names]
    assert sorted(told) == sorted(Cause)
