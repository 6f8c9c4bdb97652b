# SPDX-License-Identifier: Apache-2.0
"""Finds every `--kv-transfer-config` in a file: values of a chart, manifests, compose files, or JSON."""

import importlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pd_connector.config_rules import JSON
from pd_connector.errors import ConfigError
from pd_connector.tools.cli.checks.transfer_config import Written

_FLAG = "--kv-transfer-config"
_SPECULATIVE = "--speculative-config"
_COMMAND = re.compile(r"vllm serve|openai\.api_server|sglang\.launch_server")
_PASTED = re.compile(r"^(?:export \w+=|vllm serve |sglang serve |python3? -m )", re.M)
"""How a line begins in a script without `#!`, and in no YAML."""
_DECODER = json.JSONDecoder()
_STRING = r"""\"(?:[^"\\]|\\.)*"?"""
_KEY = re.compile(
    rf"""((?:\b|_)key\\*['"]?\s*[:=]\s*\\*)(\[(?:{_STRING}|[^]"])*|{_STRING}|'[^']*'?|[^\s'",}}]+)""",
    re.IGNORECASE,
)
"""A key and its value: a list, a string, or a word."""
_UNREADABLE = "is nested too deeply"


def in_text(text: str, place: str) -> list[Written]:
    """The configs in a text that is JSON, a shell script, or YAML of one or more documents.

    Raises:
        ConfigError: it is neither.
    """
    if text.lstrip().startswith("{") and "{{" not in text:
        return [Written(place, _object(text))]
    if text.startswith("#!") or _PASTED.search(text):
        return [
            written
            for n, line in enumerate(text.splitlines(), 1)
            for written in _in_scalar(line, f"{place}:{n}")
        ]
    return list(_in_yaml(text, place))


def _object(text: str) -> dict[str, Any] | str:
    """The object, or why the text has none."""
    shown = _KEY.sub(lambda match: match[1] + "*" * len(match[2]), text)
    try:
        value = JSON.decode(text)
    except json.JSONDecodeError as error:
        at = error.pos
        return f"{error}: ... {shown[max(0, at - 20) : at + 20].strip()} ..."
    except ValueError as error:
        return str(error)
    except RecursionError:
        return _UNREADABLE
    return value if isinstance(value, dict) else f"{shown[:40]!r} is not a JSON object"


def _in_yaml(text: str, place: str) -> Iterator[Written]:
    yaml = _pyyaml(place)
    try:
        for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
            yield from _in_node(document, place, set())
    except yaml.YAMLError as error:
        advice = "; it is a template: check the output of `helm template`" if "{{" in text else ""
        # The error's own text quotes the line, and a name in it, which may be a key.
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        problem = re.sub("(alias|handle) .*", r"\1 '***'", problem)
        raise ConfigError(f"{place}{line}: is not YAML: {problem}{advice}") from None
    except RecursionError:
        raise ConfigError(f"{place}: {_UNREADABLE}") from None


def _pyyaml(place: str) -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise ConfigError(f"{place}: PyYAML reads it: pip install pyyaml") from None


def _in_node(node: Any, place: str, seen: set[int]) -> Iterator[Written]:
    """The configs in a node of YAML. `seen` has the nodes before it: aliases can name one very often."""
    yaml = _pyyaml(place)
    if id(node) in seen:
        return
    seen.add(id(node))
    where = f"{place}:{node.start_mark.line + 1}" if node is not None else place
    if isinstance(node, yaml.MappingNode):
        if any(key.value == "kv_connector" for key, _ in node.value):
            twice = _twice(node, set())
            yield Written(where, twice or _constructed(node))
            return
        for _, value in node.value:
            yield from _in_node(value, place, seen)
    elif isinstance(node, yaml.SequenceNode):
        flagged = False
        scalars = [item.value if isinstance(item, yaml.ScalarNode) else "" for item in node.value]
        speculation = _speculation(scalars)
        for item, scalar in zip(node.value, scalars, strict=True):
            if flagged:
                line = f"{place}:{item.start_mark.line + 1}"
                yield Written(line, _object(scalar), speculation)
            else:
                for written in _in_node(item, place, seen):
                    yield written._replace(speculation=written.speculation or speculation)
            flagged = scalar == _FLAG
    elif isinstance(node, yaml.ScalarNode):
        yield from _in_scalar(node.value, where)


def _twice(node: Any, seen: set[int]) -> str:
    """Which key a mapping in this node has twice, of which YAML's reader takes the last; empty if none."""
    yaml = _pyyaml("")
    if id(node) in seen or isinstance(node, yaml.ScalarNode):
        return ""
    seen.add(id(node))
    inner = list(node.value)
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in inner if isinstance(key, yaml.ScalarNode)]
        if twice := [name for name in names if names.count(name) > 1]:
            return f"key {twice[0]!r} is there twice: leave one out"
        inner = [value for _, value in inner]
    return next(filter(None, (_twice(each, seen) for each in inner)), "")


def _constructed(node: Any) -> dict[str, Any]:
    loader = _pyyaml("").SafeLoader("")
    return dict(loader.construct_document(node))


def _in_scalar(text: str, where: str) -> Iterator[Written]:
    """Configs in an argument, a command or a shell script."""
    if '\\"' in text:
        text = text.replace('\\"', '"')
    start = 0
    while (
        match := re.search(rf"{_FLAG}[=\s]+['\"]?(?=\{{)|(?=\{{\s*\"kv_)", text[start:])
    ) is not None:
        at = start + match.end()
        try:
            value, end = JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            yield Written(where, _object(text[at:].split("'")[0].strip()))
            return
        begins = [match.start() for match in _COMMAND.finditer(text)]
        begin = max((place for place in begins if place <= at), default=0)
        stop = min((place for place in begins if place > at), default=len(text))
        yield Written(where, value, _speculation([text[begin:stop]]))
        start = end


def _speculation(words: Sequence[str]) -> str:
    """The value of `--speculative-config` in the words of a command, or within one of them; empty without one."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        before, flag, value = word.partition(_SPECULATIVE)
        if flag and not before and not value:
            return following
        if flag:
            value = value.lstrip("= '\"\n\t")
            try:
                return json.dumps(_DECODER.raw_decode(value)[0])
            except ValueError:
                return value.split()[0] if value else ""
    return ""
