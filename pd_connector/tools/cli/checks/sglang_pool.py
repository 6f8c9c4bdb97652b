# SPDX-License-Identifier: Apache-2.0
"""SGLang engines in a script or manifest: their config, and whether their arguments can be combined with a KV pool."""

import json
import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from pd_connector.config import CONFIG_VARIABLE
from pd_connector.errors import ConfigError
from pd_connector.pool import settings
from pd_connector.sglang.pool_settings import check_arguments, check_page_size
from pd_connector.sglang.settings import load_config
from pd_connector.tools.cli.checks.finding import Finding, Status

_COMMAND = re.compile(r"sglang\.launch_server|sglang serve|vllm serve|openai\.api_server")
_VALUE = r"[A-Za-z0-9_./]+"
_OPTION = re.compile(rf"--([a-z][a-z0-9-]*)(?:=({_VALUE})|[\"',\s\\]+(?:-\s+[\"']?)?({_VALUE}))?")
_NEAR = 80
"""Most characters between the variable's name and its value."""
_BETWEEN = re.compile(r"""[\s"'=:,\\|>-]*(?:value[\s"'=:\\|>-]*)?""")
"""What can be between them; after other text an object is something else's."""


def in_text(text: str, place: str, environment: Mapping[str, str]) -> list[Finding]:
    """Findings about the SGLang engines that a text starts; none if it has no config of theirs.

    Args:
        environment: variables of the engines' processes.
    """
    return list(_findings(text, place, environment))


def _findings(text: str, place: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    written, source, at = _config(text)
    if not source:
        return
    where = f"{place}:{text.count(chr(10), 0, at) + 1}"
    try:
        config = load_config(source, environment)
    except ConfigError as error:
        yield from (Finding(where, "SGLang's config", Status.FAIL, said) for said in error.args)
        return
    if not config.pool:
        keys = ", ".join(f"{name} {value!r}" for name, value in written.items() if name != "key")
        yield Finding(where, "SGLang's config", Status.OK, keys or "defaults")
        return
    commands = [*_COMMAND.finditer(text)]
    stops = [*(command.start() for command in commands[1:]), len(text)]
    for command, stop in zip(commands, stops, strict=True):
        if "sglang" not in command.group():
            continue
        where = f"{place}:{text.count(chr(10), 0, command.start()) + 1}"
        try:
            settings.check(config.pool)
            given = _options(text[command.end() : stop])
            check_arguments(given)
            check_page_size(given.page_size)
        except ConfigError as error:
            yield Finding(where, "SGLang's pool", Status.FAIL, str(error))
        else:
            yield Finding(where, "SGLang's pool", Status.OK, f"in use by {CONFIG_VARIABLE}")


def _config(text: str) -> tuple[dict[str, Any], str, int]:
    """The object in the variable of the config, as far as the text has it, its own text, and where that begins."""
    for match in re.finditer(CONFIG_VARIABLE, text):
        begin = text.find("{", match.end(), match.end() + _NEAR)
        if begin < 0 or not _BETWEEN.fullmatch(text, match.end(), begin):
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value, text[begin:end], begin
    return {}, "", 0


def _options(command: str) -> Any:
    """SGLang's arguments in a command, as its `ServerArgs` names them."""
    given: dict[str, Any] = {"page_size": 1}
    for name, joined, apart in _OPTION.findall(command):
        value = joined or apart
        given[name.replace("-", "_")] = int(value) if value.isdigit() else value or True
    return SimpleNamespace(**given)
