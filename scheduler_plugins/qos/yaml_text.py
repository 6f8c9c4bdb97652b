# SPDX-License-Identifier: Apache-2.0
"""A YAML file of settings, and messages that name the line and the key that was meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from pd_connector.errors import did_you_mean

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(.+?)`")
_CHOICE = re.compile(r"Invalid enum value '(.*?)'")
_PATH = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_FIRST_WORD = re.compile(r"([a-z_]+)(?:\[(\d+)\])?")
_QUOTED = re.compile(r"'([^']*)'")


class YamlText:
    """The text of a file.

    Args:
        source: the file's name, for messages.
    """

    def __init__(self, text: bytes, source: str) -> None:
        self._text = text
        self._source = source

    def decode(self, form: type[T]) -> T:
        """The settings, as this msgspec type.

        Raises:
            ValueError: the text is not YAML, has unknown keys, a key twice in one mapping, or a value of another type. The
                message begins with the file's name and the line, and names every unknown key before the first value of another type.
        """
        if twice := _twice(self._text):
            raise ValueError(self._message(f"key {twice[0]!r} is there twice", twice[1]))
        try:
            return msgspec.yaml.decode(self._text, type=form)
        except msgspec.ValidationError as error:
            raise ValueError("; ".join(self._mistakes(str(error), form))) from None
        except msgspec.DecodeError as error:
            said = str(error).splitlines()
            line = re.search(r"line (\d+)", said[-1])
            said = said[:-1] if line and len(said) > 1 else said
            raise ValueError(self._message("; ".join(said), int(line[1]) if line else 0)) from None

    def wrong(self, error: Exception) -> str:
        """The message of an error about a value that the text has. It names the line, if the line can be found.

        Args:
            error: its message begins with a key, or has the value in quotes.
        """
        said = str(error)
        word = _FIRST_WORD.match(said)
        quoted = _QUOTED.search(said)
        line = 0
        if root := _composed(self._text):
            if word:
                line = _line_of_key(root, word[1], int(word[2]) if word[2] else None)
            if quoted:
                line = _line_of_text(root, quoted[1]) or line
        return self._message(said, line)

    def _mistakes(self, said: str, form: type) -> Iterator[str]:
        """The messages of this mistake, and of further mistakes that show when each unknown key has been removed."""
        content = msgspec.yaml.decode(self._text)
        while True:
            yield self._validation(said, form)
            if not _taken_out(content, said):
                return
            try:
                msgspec.convert(content, form)
            except msgspec.ValidationError as error:
                said = str(error)
            else:
                return
            if (
                "missing required field" in said
            ):  # it was probably there, under the key that is not known
                return

    def _validation(self, said: str, form: type) -> str:
        unknown = _UNKNOWN.search(said)
        steps = [*_steps(said), *([unknown[1]] if unknown else ())]
        return self._message(explained(said, form), _line_at(_composed(self._text), steps))

    def _message(self, said: str, line: int) -> str:
        return f"{self._source}:{line}: {said}" if line else f"{self._source}: {said}"


def explained(said: str, form: Any) -> str:
    """What msgspec says about a value that is not of this type, with the key, the valid keys, and the key that was
    probably meant."""
    steps = _steps(said)
    said = _PATH.sub("", said)
    kind = _kind_at(inspect.type_info(form), steps)
    unknown, choice = _UNKNOWN.search(said), _CHOICE.search(said)
    if unknown:
        field_names = [name for alternative in _kinds(kind) for name in _fields(alternative)]
        near = did_you_mean(unknown[1], field_names) or f"known are {', '.join(field_names)}"
        return f"key {unknown[1]!r} is not known; {near}"
    keys = [step for step in steps if not step.isdigit() and step != "..."]
    if keys and keys[-1] != steps[-1] and not (choice or said.startswith("Expected")):
        keys.clear()  # a type's own message names its key
    key = keys[-1] if keys else ""
    if choice:
        values = [
            str(value)
            for alternative in _kinds(kind)
            for value in getattr(alternative, "values", ())
        ]
        near = did_you_mean(choice[1], values)
        return f"{key or 'value'} {choice[1]!r}: must be one of {', '.join(values)}{'; ' + near if near else ''}"
    return f"{key}: {said}" if key else said


def _taken_out(content: Any, said: str) -> bool:
    """Take the unknown key of a message out of a file's content. Returns False if the message is about something else, or
    its place is not clear."""
    unknown = _UNKNOWN.search(said)
    for step in _steps(said):
        if isinstance(content, list) and step.isdigit() and int(step) < len(content):
            content = content[int(step)]
        elif isinstance(content, dict) and step in content:
            content = content[step]
        else:
            return False
    if unknown is None or not isinstance(content, dict) or unknown[1] not in content:
        return False
    del content[unknown[1]]
    return True


def _steps(said: str) -> list[str]:
    """The path in a message of msgspec's."""
    path = _PATH.search(said)
    return [a or b for a, b in _STEP.findall(path[1])] if path else []


def _composed(text: bytes) -> Any:
    """The text's nodes, which know their lines; None if there is none."""
    yaml: Any = import_module("yaml")  # only for the message of an error
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return None


def _twice(text: bytes) -> tuple[str, int] | None:
    """The first key that a mapping has twice, and its line; None if there is none, or the text is not YAML.

    YAML's decoder takes the last one without a word.
    """
    yaml: Any = import_module("yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    above = [_Open(False, set())]
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.CollectionEndEvent):
                above.pop()
            elif isinstance(event, yaml.NodeEvent):
                scalar = event.value if isinstance(event, yaml.ScalarEvent) else None
                if above[-1].twice(scalar):
                    return str(scalar), event.start_mark.line + 1
                if isinstance(event, yaml.CollectionStartEvent):
                    above.append(_Open(isinstance(event, yaml.MappingStartEvent), set()))
    except yaml.YAMLError:
        pass
    return None


@dataclass
class _Open:
    """A mapping or a sequence whose end is not read yet."""

    mapping: bool
    keys: set[str]
    nodes: int = 0  # keys and values

    def twice(self, scalar: str | None) -> bool:
        """Count a node, and say whether it is a key that was there before. `scalar`: its text, if it is one."""
        self.nodes += 1
        # YAML merges what each `<<` names.
        if not self.mapping or self.nodes % 2 == 0 or scalar in (None, "<<"):
            return False
        size = len(self.keys)
        self.keys.add(scalar)
        return len(self.keys) == size


def _entries(node: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a mapping; none of another node."""
    return list(node.value) if node is not None and node.id == "mapping" else []


def _line_at(node: Any, steps: Sequence[str]) -> int:
    """The line of the key or element at this path, or else of the deepest existing element of the path; 0: there is
    none."""
    line = node.start_mark.line + 1 if node is not None and steps else 0
    for n, step in enumerate(steps):
        if step == "...":
            rest = steps[n + 1 :]
            lines = [_line_at(value, rest) for _, value in _entries(node) if _leads(value, rest)]
            return lines[0] if lines and rest else line
        pairs = [(key, value) for key, value in _entries(node) if key.value == step]
        if pairs:
            line, node = pairs[-1][0].start_mark.line + 1, pairs[-1][1]
        elif step.isdigit() and node.id == "sequence" and int(step) < len(node.value):
            node = node.value[int(step)]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _leads(node: Any, steps: Sequence[str]) -> bool:
    return not steps or any(key.value == steps[0] for key, _ in _entries(node))


def _line_of_key(root: Any, name: str, element: int | None) -> int:
    """The line of a key of the top level or of one of its sections; 0: there is none."""
    steps = [name] if element is None else [name, str(element)]
    if any(key.value == name for key, _ in _entries(root)):
        return _line_at(root, steps)
    for _, section in _entries(root):
        if any(key.value == name for key, _ in _entries(section)):
            return _line_at(section, steps)
    return 0


def _scalars(node: Any) -> Iterator[Any]:
    if node.id == "scalar":
        yield node
    for child in node.value if node.id != "scalar" else ():
        for inner in child if isinstance(child, tuple) else (child,):
            yield from _scalars(inner)


def _line_of_text(root: Any, text: str) -> int:
    """The line of the first key or value that equals this text, or else contains it; 0: there is none."""
    matches = [node for node in _scalars(root) if text and text in node.value]
    matches = [node for node in matches if node.value == text] or matches
    return matches[0].start_mark.line + 1 if matches else 0


def _kinds(kind: Any) -> Sequence[Any]:
    return getattr(kind, "types", (kind,))


def _fields(kind: Any) -> dict[str, Any]:
    return {field.encode_name: field.type for field in getattr(kind, "fields", ())}


def _kind_at(kind: Any, steps: Sequence[str]) -> Any:
    """The type at this path; None if it has none of its own."""
    for step in steps:
        inner = [
            candidate
            for alternative in _kinds(kind)
            for candidate in (
                _fields(alternative).get(step),
                getattr(alternative, "item_type", None),
                getattr(alternative, "value_type", None),
            )
            if candidate is not None
        ]
        if not inner:
            return None
        kind = inner[0]
    return kind
