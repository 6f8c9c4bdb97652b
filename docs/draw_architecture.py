# SPDX-License-Identifier: Apache-2.0
"""Draws docs/architecture.svg, and writes the table of rooms in docs/architecture.md: `python docs/draw_architecture.py`.

Both are made from the import contracts in pyproject.toml, which `make lint` checks against the code. What a room
is for is the first sentence of its docstring. Numbers in the picture are the steps of the section "One page of KV, from
cache to cache"; each stands at the room whose file the step names first. A test makes both again and compares.
"""

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "architecture.svg"
FOLDERS = {
    "pd_connector": "pd_connector",
    "scheduler_plugins": "scheduler_plugins",
    "pd_kernels": "kernels/pd_kernels",
}
STEPS = "## One page of KV, from cache to cache"
TABLES = {"rooms": FOLDERS, "router": {"scheduler_plugins.router": "scheduler_plugins/router"}}
"""Tables of the page: which packages' rooms each lists. It stands between two comments with its name."""

MARGIN, GAP, PANEL_GAP, PAD = 24, 10, 26, 14
PANEL_WIDTHS = {"pd_connector": 590, "scheduler_plugins": 390, "pd_kernels": 270}
HEAD, LINE, BADGE = 66, 15, 9
CHARACTER = 6.5
"""Width of a character of the widest of the usual fonts, in pixels."""
COLOURS = {  # fill, edge
    "door": ("#fff1dc", "#c98a2b"),
    "core": ("#e4f4e6", "#4f9a5b"),
    "other": ("#eaf0f8", "#7089ad"),
}


RULES = (
    "A room imports only from rooms below it in its package; rooms side by side do not import each other.",
    "scheduler_plugins also uses pd_connector, and pd_connector uses pd_kernels; never the reverse. Doors do not know each other.",
    "A payload's format and checksum lie in pd_kernels, for codecs and kernels alike.",
)


@dataclass
class Room:
    """A folder or a file with its own place in the order."""

    package: str
    name: str
    noun: str
    kind: str  # a key of COLOURS
    steps: list[int] = field(default_factory=list)

    @property
    def module(self) -> str:
        return f"{self.package}.{self.name}"

    @property
    def source(self) -> Path:
        return source(self.module)

    @property
    def label(self) -> str:
        return f"{self.name}/" if self.source.name == "__init__.py" else f"{self.name}.py"


def source(module: str) -> Path:
    """The file of a module, or the __init__.py of a package."""
    package, _, rest = module.partition(".")
    place = ROOT / FOLDERS[package] / rest.replace(".", "/")
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def first_sentence(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


def contracts() -> dict[str, dict]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {one["id"]: one for one in settings["tool"]["importlinter"]["contracts"]}


def floors(package: str) -> list[list[Room]]:
    """The rooms of a package, top floor first."""
    known = contracts()
    (order,) = (one for one in known.values() if one.get("containers") == [package])
    doors, core = set(known["doors"]["modules"]), set(known["core"]["source_modules"])

    def room(name: str) -> Room:
        module = f"{package}.{name}"
        kind = "door" if module in doors else "core" if module in core else "other"
        return Room(package, name, first_sentence(source(module)), kind)

    names = ([one.strip() for one in floor.split("|")] for floor in order["layers"])
    return [[room(name) for name in floor] for floor in names if floor != ["__main__"]]


def steps(text: str) -> Iterator[tuple[int, str]]:
    """Number and first named file of every step on the way of a page."""
    section = text.partition(STEPS)[2].partition("\n## ")[0]
    for number, words in re.findall(r"^(\d+)\. (.*)$", section, re.MULTILINE):
        yield int(number), re.findall(r"`([\w/]+\.py)", words)[0]


def place_steps(houses: dict[str, list[list[Room]]]) -> None:
    rooms = {
        room.module: room for floors_ in houses.values() for floor in floors_ for room in floor
    }
    for number, file in steps(PAGE.read_text()):
        package, _, rest = file.removeprefix("kernels/").partition("/")
        rooms[f"{package}.{rest.split('/')[0].removesuffix('.py')}"].steps.append(number)


def wrapped(room: Room, width: float) -> list[str]:
    return textwrap.wrap(room.noun.replace("`", ""), max(12, int((width - 20) / CHARACTER)))


def widths(floor: list[Room], inner: float) -> list[float]:
    """One wide room, or several that share the floor by the length of their words."""
    least = [20 + 8.2 * len(room.label) + 2 * (BADGE + 1) * len(room.steps) for room in floor]
    free = inner - GAP * (len(floor) - 1) - sum(least)
    weights = [max(len(room.noun), 40) ** 0.5 for room in floor]
    shares = zip(least, weights, strict=True)
    return [round(least_ + free * weight / sum(weights), 1) for least_, weight in shares]


class Drawing:
    """SVG elements in the order in which they are drawn."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, edge: str) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{edge}"/>'
        )

    def text(self, x: float, y: float, words: str, style: str) -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(words)}</text>')

    def badge(self, x: float, y: float, number: int) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{BADGE}" fill="#24344d"/>')
        self.text(x, y + 3.5, str(number), "badge")

    def svg(self, width: float, height: float, title: str) -> str:
        style = (
            "text{font-family:Helvetica,Arial,DejaVu Sans,sans-serif;fill:#1d2733;font-size:11px}"
            ".title{font-size:17px;font-weight:bold}.sub{fill:#51606f}"
            ".name{font-family:Menlo,Consolas,DejaVu Sans Mono,monospace;font-size:13px;font-weight:bold}"
            ".badge{fill:#fff;font-size:10px;font-weight:bold;text-anchor:middle}"
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img">\n<title>{title}</title>\n<style>{style}</style>'
        )
        return "\n".join([head, *self.parts, "</svg>", ""])


def draw_room(
    drawing: Drawing, room: Room, x: float, y: float, width: float, height: float
) -> None:
    drawing.rect(x, y, width, height, *COLOURS[room.kind])
    drawing.text(x + 10, y + 18, room.label, "name")
    for index, number in enumerate(reversed(room.steps)):
        drawing.badge(x + width - 14 - index * 2 * (BADGE + 1), y + 14, number)
    for index, line in enumerate(wrapped(room, width)):
        drawing.text(x + 10, y + 35 + index * LINE, line, "line")


def draw_house(
    drawing: Drawing, package: str, house: list[list[Room]], x: float, y: float
) -> float:
    """Draw one package; returns where it ends."""
    inner = PANEL_WIDTHS[package] - 2 * PAD
    rows = []
    for floor in house:
        shares = widths(floor, inner)
        lines = max(len(wrapped(room, width)) for room, width in zip(floor, shares, strict=True))
        rows.append((floor, shares, 30 + lines * LINE))
    height = HEAD + sum(row[2] + GAP for row in rows) + PAD - GAP
    drawing.rect(x, y, PANEL_WIDTHS[package], height, "#f9fafc", "#b9c2cd")
    drawing.text(x + PAD, y + 26, FOLDERS[package] + "/", "title")
    for index, line in enumerate(
        textwrap.wrap(first_sentence(source(package)), int(inner / CHARACTER))[:2]
    ):
        drawing.text(x + PAD, y + 43 + index * 13, line, "sub")
    top = y + HEAD
    for floor, shares, row_height in rows:
        left = x + PAD
        for room, width in zip(floor, shares, strict=True):
            draw_room(drawing, room, left, top, width, row_height)
            left += width + GAP
        top += row_height + GAP
    return y + height


def picture() -> str:
    """The text of docs/architecture.svg."""
    houses = {package: floors(package) for package in FOLDERS}
    place_steps(houses)
    width = 2 * MARGIN + sum(PANEL_WIDTHS.values()) + PANEL_GAP * (len(houses) - 1)
    drawing = Drawing()
    x, bottom = MARGIN, 0.0
    for package, house in houses.items():
        bottom = max(bottom, draw_house(drawing, package, house, x, MARGIN))
        x += PANEL_WIDTHS[package] + PANEL_GAP
    legend(drawing, bottom + 22)
    height = bottom + 88
    background = Drawing()
    background.rect(0, 0, width, height, "#ffffff", "#ffffff")  # legible on a dark page, too
    drawing.parts = background.parts + drawing.parts
    return drawing.svg(width, height, "The rooms of pd-connector, and the way of one page of KV")


def legend(drawing: Drawing, y: float) -> None:
    x = MARGIN
    for kind, words in (
        ("core", "needs no torch, no compiler, no engine"),
        ("door", "door to an engine: the only rooms that know its types"),
        ("other", "the rest"),
    ):
        drawing.rect(x, y - 11, 16, 14, *COLOURS[kind])
        drawing.text(x + 24, y, words, "line")
        x += 44 + CHARACTER * len(words)
    drawing.badge(x + 6, y - 4, 1)
    drawing.text(x + 22, y, "where a page of KV is at each step (see the text)", "line")
    for index, words in enumerate(RULES):
        drawing.text(MARGIN, y + 20 + index * 15, words, "sub")


def table(folders: dict[str, str]) -> str:
    """The table of some packages' rooms for docs/architecture.md."""
    lines = ["", "| room | floor | what it is | |", "|---|---|---|---|"]
    kinds = {"core": "core", "door": "door", "other": ""}
    for package, folder in folders.items():
        house = floors(package)
        for number, floor in zip(range(len(house), 0, -1), house, strict=True):
            lines += [
                f"| `{folder}/{room.label}` | {number} | {room.noun} | {kinds[room.kind]} |"
                for room in floor
            ]
    return "\n".join([*lines, ""])


def with_tables(text: str) -> str:
    """The page with the tables as they must be."""
    for name, folders in TABLES.items():
        begin, end = f"<!-- {name}: made by docs/draw_architecture.py -->", f"<!-- /{name} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table(folders)}{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
    PICTURE.write_text(picture())
