# SPDX-License-Identifier: Apache-2.0
"""`wgmma.fence`: looked at in the code, on every path, because registers have no clocks.

A product must not use registers, for its sums or its left operand, that another instruction has used since the
last `wgmma.fence`. Products that add to the same registers one after another need none between them.
"""

import re

from memory import FaultError
from ptx import Instruction, Program

REGISTER = re.compile(r"%[\w$#]+")
BRANCHES = ("bra", "brx", "ret", "exit")


def _registers(product: Instruction) -> list[str]:
    """The registers of a product's sums and, where it has them there, of its left operand."""
    return [
        name
        for operand in product.operands[:2]
        if operand.startswith("{")
        for name in REGISTER.findall(operand)
    ]


def _targets(program: Program, branch: Instruction) -> list[int]:
    if branch.name in ("ret", "exit"):
        return []
    names = program.tables[branch.operands[1]] if branch.name == "brx" else branch.operands
    return [program.labels[name] for name in names]


def check_products(program: Program) -> None:
    """Raise FaultError for a product that a path reaches without the fence that it needs."""
    code = program.code
    products = {
        place: _registers(each)
        for place, each in enumerate(code)
        if each.name == "wgmma" and each.modifiers[0] == "mma_async"
    }
    bits = {name: 1 << n for n, name in enumerate({n for own in products.values() for n in own})}
    needs = {place: _bits(bits, own) for place, own in products.items()}
    uses = [_bits(bits, REGISTER.findall(each.text)) if bits else 0 for each in code]
    seen: dict[int, int] = {}
    waiting = [(0, (1 << len(bits)) - 1)] if products else []
    while waiting:
        at, used = waiting.pop()
        while at < len(code) and (at not in seen or used & ~seen[at]):
            used |= seen.get(at, 0)
            seen[at], each = used, code[at]
            if at in products and used & needs[at]:
                raise FaultError(
                    f"no wgmma.fence since a product's registers were used: {each.text[:60]} ... ({each.line})"
                )
            if each.name == "wgmma":
                used *= each.modifiers[0] != "fence"
            elif each.name in BRANCHES:
                waiting += [(target, used) for target in _targets(program, each)]
                if not each.predicate:
                    break
            else:
                used |= uses[at]
            at += 1


def _bits(bits: dict[str, int], names: list[str]) -> int:
    found = 0
    for name in names:
        found |= bits.get(name, 0)
    return found
