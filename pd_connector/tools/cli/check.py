# SPDX-License-Identifier: Apache-2.0
"""`pd-connector check`: whether engines would start with a config, without starting one."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from pd_connector.config import HOST_VARIABLE, KEY_VARIABLE
from pd_connector.control.keys import new_key
from pd_connector.errors import ConfigError
from pd_connector.extensions import load_entry_points
from pd_connector.tools.cli.checks import (
    carrier,
    configs_together,
    sglang_pool,
    transfer_config,
    written_configs,
)
from pd_connector.tools.cli.checks.finding import Finding, Status, show
from pd_connector.tools.cli.checks.transfer_config import Drafting, Written

_MOST_CHARACTERS = 4 << 20
"""The longest file that is read. A model's weights, or a device, could fill the memory."""
FOLDERS = "pd_connector.folders"
"""Entry points: a function of a folder, which gives findings; None for a folder of another kind."""


def check(
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG...",
            help="The JSON of --kv-transfer-config, or a file that has it: JSON, values of a chart, manifests, a "
            "compose file; or the folder of a plan, of which only mistakes are shown; `-` reads standard input.",
        ),
    ],
) -> None:
    """Check what --kv-transfer-config says, without an engine.

    Ends with status 1 if an engine would not start, or no KV could move.
    """
    examined = [
        each
        for config in configs
        for each in (
            _in_folder(Path(config), os.environ)
            if _is_folder(config)
            else [examine(config, os.environ)]
        )
    ]
    findings = [finding for each in examined for finding in each.findings]
    findings += configs_together.drafts_together(
        [engine for each in examined for engine in each.engines]
    )
    if findings:
        show(findings, Console())
    if any(finding.status is Status.FAIL for finding in findings):
        raise typer.Exit(1)


class Examined(NamedTuple):
    """A JSON text or a file.

    Attributes:
        engines: those that it starts.
    """

    findings: list[Finding]
    engines: list[Drafting]


def _is_folder(config: str) -> bool:
    try:
        return Path(config).is_dir()
    except (OSError, ValueError):  # JSON is not a path
        return False


def _in_folder(folder: Path, environment: Mapping[str, str]) -> list[Examined]:
    """What is wrong with a folder, and with the configs in its files."""
    results = [extension.load()(folder) for extension in load_entry_points(FOLDERS).values()]
    findings_here = [finding for findings in results for finding in findings or ()]
    if all(findings is None for findings in results):
        advice = "give a file, or the folder that `pd-router plan --out` wrote"
        findings_here = [
            Finding(str(folder), "folder", Status.FAIL, "is no folder of a plan", advice)
        ]
    texts, unreadable = list[tuple[str, str]](), list[Finding]()
    for path in sorted([*folder.glob("*.sh"), *folder.glob("*.yaml")]):
        try:
            texts.append((str(path), path.read_bytes().decode(errors="replace")))
        except OSError as error:
            unreadable.append(_unreadable(str(path), error, "let this user read it"))
    scripts = _examined([each for each in texts if each[0].endswith(".sh")], environment)
    files = [
        examine(name, environment)
        for name, text in texts
        if name.endswith(".yaml") and "kv_connector" in text
    ]
    findings_here += unreadable
    wrong = [
        part._replace(findings=[it for it in part.findings if it.status is not Status.OK])
        for part in (scripts, *files)
    ]
    return [Examined(findings_here, []), *wrong]


def examine(config: str, environment: Mapping[str, str]) -> Examined:
    """All findings about a JSON text or a file, without those about its engines' drafts.

    Args:
        environment: variables of the engine's process. If a file names PD_CONNECTOR_KEY or PD_CONNECTOR_HOST, its value
            is assumed to be right.
    """
    inline = config.lstrip().startswith("{")
    place = "config" if inline else "standard input" if config == "-" else config
    try:
        text = config if inline else _read(config)
        configs = written_configs.in_text(text, place)
    except ConfigError as error:
        return Examined([Finding(place, "file", Status.FAIL, str(error))], [])
    except (OSError, ValueError) as error:
        advice = "give the JSON of --kv-transfer-config in single quotes, or the path of a file that has it"
        return Examined([_unreadable(place, error, advice)], [])
    if not inline:
        environment = _set_in(text)
    pools = (
        []
        if inline
        else [*sglang_pool.in_text(text, place, environment), *carrier.in_text(text, place)]
    )
    if pools and not configs:
        return Examined(pools, [])
    if not configs:
        advice = (
            'engines need --kv-transfer-config \'{"kv_connector": "PDConnector", "kv_role": "kv_producer"}\'. '
            "If a chart's templates write it, check what `helm template` prints; `pd_connector.ray:build_pd_app` writes it itself"
        )
        finding = Finding(place, "connector", Status.FAIL, "no kv_connector in it", advice)
        return Examined([finding], [])
    findings = [
        finding for written in configs for finding in transfer_config.check(written, environment)
    ]
    findings += [*pools, *configs_together.together(configs)]
    if not inline and not text.lstrip().startswith("{"):
        findings += configs_together.reaches_others(text, configs)
    return Examined(findings, [engine for written in configs for engine in written.engines])


def _examined(scripts: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> Examined:
    """The engines of shell scripts, by name and text, that belong together."""
    configs, findings = list[Written](), list[Finding]()
    for place, text in scripts:
        try:
            configs += written_configs.in_text(text, place)
        except ConfigError as error:
            findings.append(Finding(place, "file", Status.FAIL, str(error)))
    environment = {**environment, **_set_in("".join(text for _, text in scripts))}
    for written in configs:
        findings += transfer_config.check(written, environment)
    for place, text in scripts:
        findings += sglang_pool.in_text(text, place, environment)
    findings += configs_together.together(configs)
    return Examined(findings, [engine for written in configs for engine in written.engines])


def _set_in(text: str) -> dict[str, str]:
    """The variables that a file sets, as far as configs need them."""
    set_there = {KEY_VARIABLE: new_key(), HOST_VARIABLE: f"value-of-{HOST_VARIABLE}"}
    return {name: value for name, value in set_there.items() if name in text}


def _read(file: str) -> str:
    """A file's text. Raises OSError or ValueError."""
    with contextlib.nullcontext(sys.stdin) if file == "-" else open(file, encoding="utf-8") as text:
        read = text.read(_MOST_CHARACTERS + 1)
    if len(read) > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS:,} characters")
    return read


def _unreadable(place: str, error: Exception, advice: str) -> Finding:
    why = (error.strerror if isinstance(error, OSError) else "") or str(error)
    if isinstance(error, UnicodeDecodeError):
        why = "it is not a text in UTF-8"
    return Finding(place, "file", Status.FAIL, f"cannot be read: {why}", advice)
