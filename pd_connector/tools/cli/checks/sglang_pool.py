# SPDX-License-Identifier: Apache-2.0
"""SGLang engines in a script or manifest: their config, and whether their arguments can be combined with a KV pool."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from pd_connector.config import CONFIG_VARIABLE
from pd_connector.errors import ConfigError
from pd_connector.pool import settings
from pd_connector.sglang.pool_settings import check_arguments, check_page_size
from pd_connector.sglang.settings import load_config
from pd_connector.tools.cli.checks.finding import Finding, Status

_COMMAND = re.compile(r"sglang\.launch_server|sglang serve|vllm serve|openai\.api_server")
_VALUE = r"[A-Za-z0-9_./]+"
_OPTION = re.compile(rf"--([a-z][a-z0-9-]*)(?:=({_VALUE})|[\"',\s\\]+(?:-\s+[\"']?)?({_VALUE}))?")
_BETWEEN = re.compile(r"""[\s"'=:,\\|>-]*(?:value[\s"'=:\\|>-]*)?""")
"""What can be between the variable's name and its value; an object behind other text is something else's."""
_LATER = re.compile(r"@|\$[A-Za-z({]|From\b")
"""How a value begins that the text does not have: of a file, a variable, a Secret (`valueFrom`)."""
_ESCAPED = re.compile(r'\{\s*\\"')
_MOST_ESCAPED = 1 << 16
"""Most characters of an object with escaped quotes."""


class _Config(NamedTuple):
    """A value of the variable.

    Attributes:
        at: where the text has it.
        source: its text; empty if the text does not have it.
        written: its object, as far as the text has it.
    """

    at: int
    source: str
    written: dict[str, Any]


def in_text(text: str, place: str, environment: Mapping[str, str]) -> list[Finding]:
    """Findings about the SGLang engines that a text starts; none if it has no config of theirs.

    Args:
        environment: variables of the engines' processes.
    """
    return list(_findings(text, place, environment))


def _findings(text: str, place: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    written = list(_configs(text))
    used = dict[int, list[re.Match[str]]]()
    commands = [*_COMMAND.finditer(text)]
    engines = [command for command in commands if "sglang" in command.group()]
    for command, own in zip(engines, _of_each(engines, written), strict=False):
        used.setdefault(own.at, []).append(command)
    for each in written:
        where = _line(text, place, each.at)
        if not each.source:
            later = "is in a file or a variable: it is checked when the engine starts"
            yield Finding(where, "SGLang's config", Status.OK, later)
            continue
        try:
            config = load_config(each.source, environment)
            if config.pool:
                settings.check(config.pool)
        except ConfigError as error:
            yield from (Finding(where, "SGLang's config", Status.FAIL, said) for said in error.args)
            continue
        users = used.get(each.at, ()) if config.pool else ()
        if not users:
            keys = (f"{name} {value!r}" for name, value in each.written.items() if name != "key")
            yield Finding(where, "SGLang's config", Status.OK, ", ".join(keys) or "defaults")
        for command in users:
            begins = (other.start() for other in commands if other.start() > command.start())
            stop = next(begins, len(text))
            where = _line(text, place, command.start())
            yield _with_pool(where, _options(text[command.end() : stop]))


def _of_each(engines: Sequence[re.Match[str]], configs: Sequence[_Config]) -> list[_Config]:
    """The config of each engine: the last before its command, as in a script.

    A manifest can have it behind the command: then all have theirs in the commands' order, or all the first one.
    """
    if not engines or not configs:
        return []
    if configs[0].at < engines[0].start():
        return [
            next(config for config in reversed(configs) if config.at < engine.start())
            for engine in engines
        ]
    if len(configs) == len(engines):
        return list(configs)
    return [configs[0]] * len(engines)


def _with_pool(where: str, given: Any) -> Finding:
    try:
        check_arguments(given)
        check_page_size(given.page_size)
    except ConfigError as error:
        return Finding(where, "SGLang's pool", Status.FAIL, str(error))
    return Finding(where, "SGLang's pool", Status.OK, f"in use by {CONFIG_VARIABLE}")


def _line(text: str, place: str, at: int) -> str:
    return f"{place}:{text.count(chr(10), 0, at) + 1}"


def _configs(text: str) -> Iterator[_Config]:
    """All values of the variable."""
    for match in re.finditer(CONFIG_VARIABLE, text):
        between = _BETWEEN.match(text, match.end())
        begin = between.end() if between else match.end()
        if _LATER.match(text, begin):
            yield _Config(begin, "", {})
        if not text.startswith("{", begin):
            continue
        given, start = text, begin
        if _ESCAPED.match(text, begin):
            given, start = text[begin : begin + _MOST_ESCAPED].replace('\\"', '"'), 0
        try:
            value, end = json.JSONDecoder().raw_decode(given, start)
        except (ValueError, RecursionError):
            continue
        yield _Config(begin, given[start:end], value)


def _options(command: str) -> Any:
    """SGLang's arguments in a command, as its `ServerArgs` names them."""
    given: dict[str, Any] = {"page_size": 1}
    for name, joined, apart in _OPTION.findall(command):
        value = joined or apart
        given[name.replace("-", "_")] = int(value) if value.isdigit() else value or True
    return SimpleNamespace(**given)
