# SPDX-License-Identifier: Apache-2.0
"""Decodes a large JSON object in pieces, so other work goes on between the pieces.

A thread would not help, because the decoder never releases the interpreter's lock. Values of up to `PIECE_BYTES` are
decoded at once. Larger values are split between elements, and texts between characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

from scheduler_plugins.router.prompt.raw_field import WITH_RAW, RawField, RawList, RawObject

PIECE_BYTES = 64 << 10
"""Bytes that are decoded at once. A piece takes at most 10 ms, however many values it holds."""
MOST_PARTS = 100_000
"""Most objects, lists and texts in a body. The router walks through all of them; a chat of 10,000 messages has
60,000."""
MOST_VALUES = 4_000_000
"""Most values in a body, such as token ids. No model's context is that long. Separators inside short texts are
counted as values, too."""
MOST_FIELDS = 1_000
"""Most fields of the top-level object."""
_MOST_DEPTH = 32
"""Most nesting levels of values that are larger than a piece. An image in a chat is at the seventh level."""
_COMMA_BYTES, _LIST_BYTES, _OBJECT_BYTES = 40, 72, 240
"""Most memory of a value, a list and an object, beyond the text."""

_SPACE = re.compile(rb"[ \t\n\r]*+")
_STRUCTURE = re.compile(rb'[\[\]{}"]')
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
_TEXT = re.compile(rb'[^"\\]*+(?:\\(?:u[0-9a-fA-F]{4}|[^u])[^"\\]*+)*+')
_LEAF = re.compile(rb'[^,\]}\[{"\s]++')

Steps = Generator[int, None, Any]
"""Yields the size in memory of the next piece, in bytes; returns the value."""


class TooComplexError(ValueError):
    """The object has more parts, fields or levels than any request needs."""


def memory_of(piece: bytes | bytearray) -> int:
    """Upper bound of a JSON text's size in memory once it is decoded, in bytes."""
    commas, lists, objects = map(piece.count, (b",", b"[", b"{"))
    return len(piece) + _COMMA_BYTES * commas + _LIST_BYTES * lists + _OBJECT_BYTES * objects


class PieceDecoder:
    """Decodes one JSON object. Used once."""

    def __init__(
        self, raw: bytes | bytearray, decode: Callable[[bytes | bytearray], Any], start: int = 0
    ) -> None:
        """Read nothing yet.

        Args:
            decode: reads a small JSON text. Raises ValueError.
            start: where the object begins.
        """
        self._raw, self._decode = raw, decode
        self._at = start
        self._parts = self._values = 0

    def steps(self) -> Steps:
        """The object, piece by piece. Large fields keep their JSON.

        Raises:
            ValueError: the text is not a JSON object.
            TooComplexError: the object exceeds a limit.
        """
        decoded: dict[str, Any] = {}
        self._expect(b"{")
        if self._peek() == b"}":
            self._expect(b"}")
        else:
            yield from self._fields(decoded)
        if self._peek():
            raise ValueError(f"trailing characters (byte {self._at})")
        return decoded

    def _fields(self, decoded: dict[str, Any]) -> Steps:
        view = memoryview(self._raw)
        while True:
            name = self._name()
            self._space()
            start = self._at
            value = yield from self._value(0)
            with_raw = WITH_RAW.get(type(value))
            if with_raw is not None and self._at - start > PIECE_BYTES // 16:
                # A long text was just joined, and is copied now. The first pause lets the loop collect what has come
                # due meanwhile, the second lets it run.
                yield 0
                yield 0
                value = with_raw(value)  # type: ignore[call-arg]
            if isinstance(value, RawField):
                value.raw = view[start : self._at]
            decoded[name] = value
            if len(decoded) > MOST_FIELDS:
                raise TooComplexError(f"it has too many fields: {MOST_FIELDS:,} at most")
            if self._ends(b"}"):
                return

    def _value(self, depth: int) -> Steps:
        """The value that begins here."""
        start = self._at
        end = self._end_of_value(start)
        if end:
            value = yield from self._piece(start, end)
            return value
        if depth >= _MOST_DEPTH:
            raise TooComplexError(
                f"it is nested too deeply: its large parts can have {_MOST_DEPTH} levels"
            )
        yield 0  # pause: a window has been scanned
        first = self._peek()
        if first == b'"':
            return (yield from self._long_text())
        self._part()
        if first == b"[":
            return (yield from self._long_list(depth + 1))
        if first == b"{":
            return (yield from self._long_object(depth + 1))
        raise ValueError(f"a value is not JSON (byte {start})")

    def _piece(self, start: int, end: int, form: bytes = b"%b") -> Steps:
        """The values from `start` to `end`. They are counted before they are decoded."""
        piece = self._raw[start:end]
        if not piece.strip():
            raise ValueError(f"a value is missing (byte {start})")
        self._values += 1 + piece.count(b",")
        if self._values > MOST_VALUES:
            raise TooComplexError(f"it has too many values: {MOST_VALUES:,} at most")
        yield memory_of(piece)
        self._at = end
        return self._decode(form % piece)

    def _long_list(self, depth: int) -> Steps:
        elements = RawList() if depth == 1 else []  # a field, which would be copied into one later
        self._expect(b"[")
        if self._peek() == b"]":
            self._expect(b"]")
            return elements
        while True:
            self._space()
            start, cut = self._at, self._last_comma(self._at)
            if cut:
                elements += yield from self._piece(start, cut, b"[%b]")
            else:
                elements.append((yield from self._value(depth)))
            if self._ends(b"]"):
                return elements

    def _long_object(self, depth: int) -> Steps:
        members = RawObject() if depth == 1 else {}
        self._expect(b"{")
        if self._peek() == b"}":
            self._expect(b"}")
            return members
        while True:
            name = self._name()
            self._space()
            members[name] = yield from self._value(depth)
            if self._ends(b"}"):
                return members

    def _long_text(self) -> Steps:
        self._expect(b'"')
        self._part()
        parts: list[str] = []
        while True:
            start = self._at
            match = _TEXT.match(self._raw, start, start + PIECE_BYTES)
            assert match is not None
            end = match.end()
            while end > start and end < len(self._raw) and self._raw[end] & 0xC0 == 0x80:
                end -= 1  # do not split a character
            ended = self._raw[end : end + 1] == b'"'
            if end == start and not ended:
                raise ValueError(f"a string does not end, or is not a valid string (byte {start})")
            yield end - start
            part = self._decode(b'"' + self._raw[start:end] + b'"')
            if parts and _is_half(parts[-1][-1:], 0xD800) and _is_half(part[:1], 0xDC00):
                pair = (parts[-1][-1] + part[0]).encode("utf-16-le", "surrogatepass")
                parts[-1], part = parts[-1][:-1], pair.decode("utf-16-le") + part[1:]
            parts.append(part)
            self._at = end
            if ended:
                self._at += 1
                return "".join(parts)

    def _end_of_value(self, start: int) -> int:
        """End of the value that begins at `start`; 0: it does not end within a piece."""
        first = self._raw[start : start + 1]
        if first not in (b"[", b"{", b'"'):
            leaf = _LEAF.match(self._raw, start, start + PIECE_BYTES)
            if leaf is None:
                raise ValueError(f"a value is missing (byte {start})")
            return leaf.end() if leaf.end() - start < PIECE_BYTES else 0
        depth, parts = 0, 0
        for match in _TOKEN.finditer(self._raw, start, start + PIECE_BYTES):
            token = match[0]
            if token == b'"':
                return 0  # the text goes on
            if token != b",":
                parts += token not in (b"]", b"}")
                depth += (token in (b"[", b"{")) - (token in (b"]", b"}"))
            if depth == 0:
                self._part(parts)
                return match.end()
        return 0

    def _last_comma(self, start: int) -> int:
        """The last place within a piece where the list elements from `start` on can be split; 0: there is none."""
        end = start + PIECE_BYTES
        first = _STRUCTURE.search(self._raw, start, end)
        if first is None or first[0] == b"]":  # numbers, the most common large values besides texts
            if first is not None:
                return first.start()
            return max(0, self._raw.rfind(b",", start, end))
        depth, cut, parts, cut_parts = 0, 0, 0, 0
        for match in _TOKEN.finditer(self._raw, start, end):
            token = match[0]
            if token == b'"':
                break
            if token == b",":
                if depth == 0:
                    cut, cut_parts = match.start(), parts
            elif token in (b"]", b"}"):
                depth -= 1
                if depth < 0:
                    cut, cut_parts = match.start(), parts
                    break
            else:
                parts += 1
                depth += token in (b"[", b"{")
        self._part(cut_parts)
        return cut

    def _name(self) -> str:
        """The name of a member, and the colon behind it."""
        self._space()
        start = self._at
        match = _TEXT.match(self._raw, start + 1, start + PIECE_BYTES)
        if self._raw[start : start + 1] != b'"' or match is None:
            raise ValueError(f"the name of a field is missing (byte {start})")
        self._at = match.end()
        self._expect(b'"')
        name: str = self._decode(self._raw[start : self._at])
        self._expect(b":")
        self._part()
        return name

    def _ends(self, mark: bytes) -> bool:
        """Whether the list or object ends here. If not, skip the comma."""
        if self._peek() == mark:
            self._expect(mark)
            return True
        self._expect(b",")
        return False

    def _part(self, count: int = 1) -> None:
        self._parts += count
        if self._parts > MOST_PARTS:
            raise TooComplexError(
                f"it has too many values: {MOST_PARTS:,} objects, lists and texts at most"
            )

    def _space(self) -> None:
        match = _SPACE.match(self._raw, self._at)
        assert match is not None
        self._at = match.end()

    def _peek(self) -> bytes:
        self._space()
        return bytes(self._raw[self._at : self._at + 1])

    def _expect(self, mark: bytes) -> None:
        if self._peek() != mark:
            byte = self._raw[self._at : self._at + 1]
            raise ValueError(f"{byte!r} where {mark!r} is wanted (byte {self._at})")
        self._at += 1


def _is_half(character: str, first: int) -> bool:
    """Whether a character is half of a surrogate pair: the first half (0xD800) or the second (0xDC00)."""
    return bool(character) and first <= ord(character) < first + 0x400
