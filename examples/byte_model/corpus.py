# SPDX-License-Identifier: Apache-2.0
"""Text that every Python installation carries: its own library, docstrings and help topics.

A document belongs to the held-out part if the hash of its name says so, so that the split
is the same on every machine and a file that changes between Python versions never crosses it.
`python corpus.py` prints the names of the held-out documents.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HELD_OUT_PART = 16
SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


class Document(NamedTuple):
    name: str  # path below the standard library, or "topics/" and a help topic
    kind: str  # "source" | "prose"
    text: str


def is_held_out(name: str) -> bool:
    """Whether a document is kept from training; docstrings go with the file they are in."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_PART == 0


def documents(held_out: bool) -> Iterator[Document]:
    """Yield every document of the held-out or the training part, in the same order each time."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if SKIPPED_FOLDERS.intersection(name.split("/")) or name == "pydoc_data/topics.py":
            continue
        if is_held_out(name) != held_out:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            docstrings = _docstrings(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        yield Document(name, "source", source)
        if docstrings:
            yield Document(name, "prose", docstrings)
    yield from (topic for topic in _topics() if is_held_out(topic.name) == held_out)
    licence = library / "LICENSE.txt"
    if licence.exists() and is_held_out(licence.name) == held_out:
        yield Document(licence.name, "prose", licence.read_text(encoding="utf-8"))


def _docstrings(source: str) -> str:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, holders))
    return "\n\n".join(text for text in found if text)


def _topics() -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a few distributions package the help topics apart
        return
    for name, text in sorted(topics.items()):
        yield Document(f"topics/{name}", "prose", text)


if __name__ == "__main__":
    for document in documents(held_out=True):
        print(f"{document.kind}\t{len(document.text.encode())}\t{document.name}")
