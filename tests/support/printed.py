# SPDX-License-Identifier: Apache-2.0
"""The commands that documents print, as a reader pastes them: blocks of a page, and whole commands of a block."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
_HEADING = re.compile(r"#+ (.*)")
_FENCE = re.compile(r" *```(\w*)")
_HERE = re.compile(r"<<'?(\w+)'?")
SHELLS = ("sh", "bash")
OF_TESTS = re.compile(r"VLLM|PD_|OMP|HF_|TORCH|VIRTUAL_ENV|PYTHON")
"""Variables that a stranger's shell does not have."""


class Block(NamedTuple):
    """Lines for a shell.

    Attributes:
        page: its file, from the repository's root.
        section: the heading above it.
        text: the lines, without the margin.
    """

    page: str
    section: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of a page that are for a shell: fenced as such, or indented."""
    section, kind, lines = "", None, list[str]()
    name = str(page.relative_to(ROOT))

    def taken() -> Iterator[Block]:
        if lines:
            margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
            text = "".join(line[margin:] + "\n" for line in lines).strip("\n") + "\n"
            yield Block(name, section, text)
            lines.clear()

    for line in [*page.read_text().splitlines(), "end"]:
        if fence := _FENCE.match(line):
            if kind is None or kind in SHELLS:
                yield from taken()
            lines.clear()
            kind = fence[1] if kind is None else None
        elif kind is not None or line.startswith("    "):
            lines.append(line)
        elif line.strip() or not lines:
            yield from taken()
            if heading := _HEADING.match(line):
                section = heading[1]


def commands(text: str) -> Iterator[str]:
    """Whole commands, each with its further lines. Comments alone are left out."""
    whole = ""
    for line in text.splitlines():
        whole += line + "\n"
        here = _HERE.search(whole)
        if line.endswith("\\") or (here and not re.search(rf"^{here[1]}$", whole, re.M)):
            continue
        try:
            words = here or shlex.split(whole, comments=True)
        except ValueError:  # a quotation goes on
            continue
        if words:
            yield whole
        whole = ""
    assert not whole.strip(), f"a command without an end: {whole}"


def words(command: str) -> list[str]:
    """Words of a simple command up to the first operator, without variables that are set for it."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found = list(lexer)
    while found and re.match(r"\w+=", found[0]):
        del found[0]
    end = next((at for at, word in enumerate(found) if word[0] in ";&|<>"), len(found))
    return found[:end]
