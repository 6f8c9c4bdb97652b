# SPDX-License-Identifier: Apache-2.0
"""Disassembled code of Hopper: the path that a full tile takes, and the cycles that it costs."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?(\S+?)(?:\s+(.*?))?\s*;", re.M
)
_PREDICATED = re.compile(r"^!?U?P\d")
_PRODUCTS = ("HMMA", "HGMMA", "QGMMA")


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        address: bytes from the start of the kernel.
        guard: its predicate; "" if it is always executed.
        name: opcode with modifiers, such as `LDG.E.128`.
        operands: the rest of the line.
    """

    address: int
    guard: str
    name: str
    operands: str

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @property
    def conditional(self) -> bool:
        """Whether code behind a branch or an exit can be reached through it."""
        return bool(self.guard or _PREDICATED.match(self.operands) or ".DIV" in self.name)

    @property
    def target(self) -> int | None:
        """Where a branch leads."""
        place = re.search(r"0x([0-9a-f]+)$", self.operands)
        return int(place[1], 16) if self.opcode == "BRA" and place else None

    @property
    def width(self) -> int:
        """Bytes that a thread reads or writes at once."""
        bits = re.search(r"\.(128|64|U16|S16|U8|S8)\b", self.name)
        return int(bits[1].strip("US")) // 8 if bits else 4


Code = Sequence[Instruction]


def instructions(sass: str) -> list[Instruction]:
    """The instructions of a disassembly, in order of address."""
    return [
        Instruction(int(address, 16), guard, name, operands)
        for address, guard, name, operands in _INSTRUCTION.findall(sass)
    ]


def full_path(code: Code) -> list[Instruction]:
    """The path through a kernel that stores the most, and among these the shortest one.

    A full tile takes it: paths for tiles that end early store less, and paths for rare values (NaN,
    a scale that is waited for) are longer. A loop is counted once.
    """
    path = _best_path(code, {place for place, each in enumerate(code) if _exits(each)})
    if not path:
        raise ValueError(f"{len(code)} instructions: no way leads from the first one to an EXIT")
    return path


def product_loops(code: Code) -> list[list[Instruction]]:
    """One turn of each innermost loop that has matrix products: the shortest path with the most
    products. A loop is everything from the target of a backward branch to the branch."""
    places = {each.address: place for place, each in enumerate(code)}
    spans = [
        (places[each.target], place)
        for place, each in enumerate(code)
        if each.target is not None and each.target < each.address
    ]
    spans = [span for span in spans if _products(code[span[0] : span[1] + 1])]
    inner = [
        span
        for span in spans
        if not any(other != span and span[0] <= other[0] <= other[1] <= span[1] for other in spans)
    ]
    return [_best_path(code[first : last + 1], {last - first}) for first, last in inner]


def _products(code: Code) -> int:
    return sum(each.opcode in _PRODUCTS for each in code)


def _exits(each: Instruction) -> bool:
    return each.opcode == "EXIT" and not each.conditional


def _best_path(code: Code, ends: set[int]) -> list[Instruction]:
    """The path from the first instruction to one of `ends` with the most products, then the most
    bytes stored, then the fewest instructions. Backward branches are not taken. [] if there is none.
    """
    places = {each.address: place for place, each in enumerate(code)}
    best: list[tuple[int, int, int] | None] = [None] * len(code)
    following = [-1] * len(code)
    for place in reversed(range(len(code))):
        each = code[place]
        own = (-_products([each]), -each.width if each.opcode == "STG" else 0, 1)
        if place in ends:
            best[place] = own
            continue
        for after in _successors(place, each, places):
            rest = best[after] if place < after < len(code) else None
            if rest is None:
                continue
            extended = (own[0] + rest[0], own[1] + rest[1], own[2] + rest[2])
            best_before = best[place]
            if best_before is None or extended < best_before:
                best[place], following[place] = extended, after
    if best[0] is None:
        return []
    path, place = [code[0]], following[0]
    while place >= 0:
        path.append(code[place])
        place = following[place]
    return path


def _successors(place: int, each: Instruction, places: dict[int, int]) -> list[int]:
    successors = []
    if each.opcode not in ("BRA", "EXIT", "RET") or each.conditional:
        successors.append(place + 1)
    if each.target is not None and each.target in places:
        successors.append(places[each.target])
    return successors


@dataclass(frozen=True)
class Cost:
    """What a path costs.

    Attributes:
        cycles: cycles of each pipe of a multiprocessor, for all warps of a program. `memory` is the
            pipe of loads, stores and shuffles, `operands` the reading of matrices by `wgmma`.
        counts: instructions of a warp by opcode; accesses to global memory also by opcode and
            bytes, as `LDG 16`.
        instructions: instructions of a warp.
    """

    cycles: dict[str, float]
    counts: dict[str, int]
    instructions: int

    @classmethod
    def of(cls, path: Iterable[Instruction], warps: int) -> "Cost":
        cycles: dict[str, float] = {}
        counts: Counter[str] = Counter()
        issued = [each for each in path if each.opcode != "NOP"]
        for each in issued:
            counts[each.opcode] += 1
            if each.opcode in ("LDG", "STG", "LDGSTS"):
                counts[f"{each.opcode} {each.width}"] += 1
            for pipe, taken in _taken(each).items():
                cycles[pipe] = cycles.get(pipe, 0) + taken * warps / 4
        return cls(cycles, dict(counts), len(issued))

    def __add__(self, other: "Cost") -> "Cost":
        pipes = {*self.cycles, *other.cycles}
        cycles = {pipe: self.cycles.get(pipe, 0) + other.cycles.get(pipe, 0) for pipe in pipes}
        counts = dict(Counter(self.counts) + Counter(other.counts))
        return Cost(cycles, counts, self.instructions + other.instructions)

    @property
    def busiest(self) -> str:
        return max(sorted(self.cycles), key=lambda pipe: self.cycles[pipe])


_ALU = re.compile(
    r"(IADD3|LOP3|SHF|PRMT|ISETP|IMNMX|VIMNMX3?|SEL|LEA|PLOP3|IABS|BMSK|SGXT|FMNMX3?|FSETP|FSEL|FCHK"
    r"|VABSDIFF4?|P2R|R2P|I2IP|F2FP|VIADD|VIADDMNMX|IDP|POPC|FLO)$"
)
_FLOAT = re.compile(r"(FFMA|FMUL|FADD|HFMA2|HMUL2|HADD2|FSWZADD)$")
_CONVERSION = re.compile(r"(I2F|I2FP|F2I|F2F|I2I|FRND)$")
_MEMORY = re.compile(r"(LDG|STG|LDS|STS|LDL|STL|LD|ST|LDGSTS|ATOM|ATOMG|ATOMS|RED|REDG)$")


def _taken(each: Instruction) -> dict[str, float]:
    """Cycles of each pipe that an instruction of one warp takes on its quarter of a multiprocessor.

    Source: results per cycle and multiprocessor, CUDA C++ Programming Guide, section "Arithmetic
    Instructions", compute capability 9.0; 128 bytes of shared memory a cycle. `mma.sync` reaches
    62 % of `wgmma` (Luo et al., arXiv 2402.13499).
    """
    name = each.opcode
    units: dict[str, float] = {"issue": 1}
    if _ALU.match(name):
        units["alu"] = 2
    elif name == "IMAD":
        units["fma"] = 2
    elif _FLOAT.match(name):
        units["fma"] = 1
    elif _CONVERSION.match(name):
        units["xu"] = 2
    elif name in ("MUFU", "REDUX"):
        units["xu"] = 8
    elif name == "SHFL":
        units["memory"] = 4
    elif _MEMORY.match(name):
        units["memory"] = max(4, each.width)
    elif name in ("LDSM", "STSM"):
        matrices = re.search(r"\.([24])$", each.name)
        units["memory"] = 4 * (int(matrices[1]) if matrices else 1)
    elif name == "HMMA":
        units["tensor"] = 4 * 2_048 / (0.62 * 2_048)
    elif name in ("HGMMA", "QGMMA"):
        units |= _group_product(each)
    return units


def _group_product(each: Instruction) -> dict[str, float]:
    """Cycles of a product of four warps, divided by four, because each warp has the instruction.

    The right matrix lies in shared memory, and so does the left one unless it is in registers.
    """
    shape = re.search(r"\.(\d+)x(\d+)x(\d+)", each.name)
    if shape is None:
        raise ValueError(f"{each.name}: no shape MxNxK in the name of a product")
    lines, columns, depth = map(int, shape.groups())
    element = 1 if each.opcode == "QGMMA" else 2
    left = 0 if re.search(r"^R\d+, R\d+, gdesc", each.operands) else lines
    rate = 2_048 * (2 if element == 1 else 1)
    return {
        "tensor": lines * columns * depth / rate,
        "operands": (left + columns) * depth * element / 128,
    }
