# SPDX-License-Identifier: Apache-2.0
"""Read the PTX of one kernel: its parameters, registers, labels and instructions."""

import re
from dataclasses import dataclass, field

LABEL = re.compile(r"([$\w]+):(?!:)")
REGISTERS = re.compile(r"(%?[\w$]+)<(\d+)>")
PARAMETER = re.compile(r"\.param\s+(.*?)([\w$]+)(?:\[(\d+)\])?$", re.S)
MATRIX_OPERATIONS = ("shfl", "redux", "elect", "mma", "ldmatrix", "stmatrix", "bar", "barrier")


def split_operands(text: str) -> list[str]:
    """The parts of a list, separated by commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()] if text[start:].strip() else parts


@dataclass(slots=True)
class Instruction:
    """One instruction.

    Attributes:
        line: file and line of the kernel's source, as the compiler told it.
        modifiers: the opcode's parts after the first; `::` is written `_`.
        predicate: register of the guard, "" without one; `negated` if it stands with `!`.
        origins: the parameters that its address comes from (`extents.py`).
        lanes: how many neighbouring threads must execute it together: 1, a warp or a warpgroup.
    """

    text: str
    line: str
    name: str
    modifiers: tuple[str, ...]
    operands: list[str]
    predicate: str = ""
    negated: bool = False
    origins: int = 0
    lanes: int = field(init=False)

    def __post_init__(self) -> None:
        together = self.name in MATRIX_OPERATIONS and "warp" not in self.modifiers
        self.lanes = 128 if self.name == "wgmma" else 32 if together else 1

    def __str__(self) -> str:
        return f"`{self.text}` ({self.line})"


@dataclass
class Program:
    """A kernel.

    Attributes:
        parameters: size in bytes of each parameter, in order, by name.
        registers: place and width in bits of each register, by name; 1 bit for a predicate.
        labels: the instruction that follows a label.
        tables: labels of a `.branchtargets` list, by its own label.
    """

    parameters: dict[str, int] = field(default_factory=dict)
    registers: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    code: list[Instruction] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> "Program":
        text = re.sub(r"//.*", "", text)
        found = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, re.S)
        if found is None:
            raise ValueError("no .entry in this PTX")
        program = cls()
        for told in split_operands(found[2]):
            match = PARAMETER.match(told)
            assert match, told
            width = re.search(r"\.[usbf](\d+)", match[1])
            assert width, told
            program.parameters[match[2]] = int(match[3] or 1) * int(width[1]) // 8
        program.shared.update(re.findall(r"\.shared\s.*?\.b8\s+([\w$]+)\[", text))
        files = dict(re.findall(r'\.file\s+(\d+)\s+.*?([^"/]+)"\s*$', text, re.M))
        _Reader(program, files).read(_body(text, found.end()))
        return program


def _body(text: str, start: int) -> str:
    """The text from behind an opening bracket to the bracket that closes it; `.loc` as a
    statement."""
    depth = 1
    for bracket in re.finditer(r"[{}]", text[start:]):
        depth += 1 if bracket[0] == "{" else -1
        if depth == 0:
            body = text[start : start + bracket.start()]
            return re.sub(r"^\s*\.loc\s+(\d+)\s+(\d+).*$", r".loc \1 \2;", body, flags=re.M)
    raise ValueError("the kernel's body does not end")


class _Reader:
    """Goes through a kernel's body. Names of a scope belong to the scope."""

    def __init__(self, program: Program, files: dict[str, str]) -> None:
        self.program, self.files = program, files
        self.scopes: list[dict[str, str]] = []
        self.count = 0
        self.line = ""
        self.last_label = ""

    def read(self, body: str) -> None:
        place = 0
        while match := re.compile(r"\s*").match(body, place):
            place = match.end()
            if place >= len(body):
                return
            if body[place] == "{":
                self.count += 1
                end = body.index("}", place)
                scope = body[place:end]
                own = {*re.findall(r"([$\w]+):(?!:)", scope)}
                for names in re.findall(r"\.reg\s+\.\w+\s+(.*?);", scope):
                    own |= set(split_operands(names))
                self.scopes.append({name: f"{name}#{self.count}" for name in own})
                place += 1
            elif body[place] == "}":
                self.scopes.pop()
                place += 1
            elif label := LABEL.match(body, place):
                self.last_label = self.own(label[1])
                self.program.labels[self.last_label] = len(self.program.code)
                place = label.end()
            else:
                end = body.index(";", place)
                self.statement(" ".join(body[place:end].split()))
                place = end + 1

    def own(self, text: str) -> str:
        """`text` with the names of the scope that it stands in."""
        for scope in self.scopes:
            for name, unique in scope.items():
                text = re.sub(rf"(?<![\w%$.]){re.escape(name)}(?![\w#])", unique, text)
        return text

    def statement(self, text: str) -> None:
        if text.startswith(".loc"):
            _, file, line = text.split()
            self.line = f"{self.files.get(file, file)}:{line}" if line != "0" else self.line
        elif text.startswith(".branchtargets"):
            self.program.tables[self.last_label] = split_operands(text.split(None, 1)[1])
        elif text.startswith(".reg"):
            self.declare(text)
        elif text and not text.startswith("."):
            self.instruction(self.own(text))

    def declare(self, text: str) -> None:
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text)
        assert match, text
        width = 1 if match[1] == "pred" else int(re.sub(r"\D", "", match[1]))
        for told in split_operands(match[2]):
            many = REGISTERS.match(told)
            names = [f"{many[1]}{n}" for n in range(int(many[2]))] if many else [self.own(told)]
            for name in names:
                self.program.registers.setdefault(name, (len(self.program.registers), width))

    def instruction(self, text: str) -> None:
        match = re.match(r"(?:@(!?)(%?[\w$#]+)\s+)?([\w.:]+)\s*(.*)", text)
        assert match, text
        name, *modifiers = match[3].replace("::", "_").split(".")
        self.program.code.append(
            Instruction(
                *(text, self.line, name, tuple(modifiers), split_operands(match[4])),
                *(match[2] or "", match[1] == "!"),
            )
        )
