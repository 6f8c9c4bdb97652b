# SPDX-License-Identifier: Apache-2.0
"""Damage to compiled kernels, one at a time, for negative controls: what of it is found?

A barrier whose removal is not found is redundant for what was executed: clocks order every access without it,
in whatever order threads run.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from emulator import Damage, Emulator, code_at
from memory import FaultError
from operands import UnknownError
from ptx import Instruction
from streams import STREAMS

ACCESSES = (
    "ld",
    "st",
    "ldmatrix",
    "stmatrix",
    "atom",
    "red",
    "cp",
    "wgmma",
    "mbarrier",
    "bra",
    "ret",
)
LESS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}


def _without(instruction: Instruction) -> Instruction:
    return Instruction(f"(no {instruction.text})", instruction.line, "nothing", (), [])


def _barrier(old: Instruction) -> Instruction | None:
    """A barrier is removed, of a CTA or within a warp."""
    return _without(old) if old.name in ("bar", "barrier") else None


def _wait(old: Instruction) -> Instruction | None:
    """A wait lets one more group be under way; a wait for an mbarrier does not wait."""
    if old.name in ("cp", "wgmma") and "wait_group" in old.modifiers:
        return replace(old, operands=[str(int(old.operands[0], 0) + 1)], text=f"{old.text} + 1")
    if old.name == "mbarrier" and "try_wait" in old.modifiers:
        return Instruction(f"(no {old.text})", old.line, "mov", ("pred",), [old.operands[0], "1"])
    return None


def _bound(old: Instruction) -> Instruction | None:
    """A comparison is off by one."""
    if old.name != "setp" or old.modifiers[0] not in LESS or old.modifiers[-1][0] == "f":
        return None
    changed = (LESS[old.modifiers[0]], *old.modifiers[1:])
    return replace(old, modifiers=changed, text=f"{old.text} as {changed[0]}")


def _order(old: Instruction) -> Instruction | None:
    """An atomic or a load loses its order; a fence is removed."""
    if old.name == "fence" or (old.name == "wgmma" and old.modifiers[0] == "fence"):
        return _without(old)
    if old.name in ("atom", "ld") and {"acq_rel", "acquire"} & set(old.modifiers):
        changed = tuple(re.sub("acq_rel|acquire", "relaxed", each) for each in old.modifiers)
        return replace(old, modifiers=changed, text=f"{old.text} as relaxed")
    return None


def _arrival(old: Instruction) -> Instruction | None:
    """An arrival or a commit is left out; an mbarrier waits for one more arrival, or for half of the bytes."""
    if old.name in ("cp", "wgmma") and "commit_group" in old.modifiers:
        return _without(old)
    if old.name != "mbarrier" or old.modifiers[0] not in ("init", "arrive"):
        return None
    if old.modifiers[0] == "arrive" and "expect_tx" not in old.modifiers:
        return _without(old)
    number = int(old.operands[-1], 0)
    changed = str(number + 1 if old.modifiers[0] == "init" else number // 2)
    return replace(old, operands=[*old.operands[:-1], changed], text=f"{old.text} as {changed}")


def _guard(old: Instruction) -> Instruction | None:
    """A load or store, a copy, or an arrival is done by threads that must not."""
    if not old.predicate or old.name not in ("ld", "st", "atom", "red", "cp", "mbarrier"):
        return None
    return replace(old, predicate="", text=f"(all threads) {old.text}")


KINDS: dict[str, Callable[[Instruction], Instruction | None]] = {
    "barrier": _barrier,
    "wait": _wait,
    "bound": _bound,
    "order": _order,
    "arrival": _arrival,
    "guard": _guard,
}
ANY = "any"
FOUND = FaultError, UnknownError, AssertionError
"""What tells of a damage. Any other error is the emulator's own, and ends the sweep."""


def damages(kind: str, reached: dict[Path, bytearray]) -> Iterator[Damage]:
    """All damages of a kind to instructions that a run has reached. Two barriers with no access between them
    are one: Triton puts its own beside a kernel's. Comparisons and guards of one line are one: of an unrolled
    loop, only one may meet the bound."""
    for path, executed in reached.items():
        code, groups = code_at(path).program.code, {}
        last: Any = None
        for place, old in enumerate(code):
            new = KINDS[kind](old) if executed[place] else None
            if old.name in ACCESSES:
                last = None
            if new is None:
                continue
            key: Any = place
            if kind == "barrier":
                key = last = place if last is None or code[last].text != old.text else last
            elif kind in ("bound", "guard"):
                key = old.line, old.name, old.modifiers
            groups.setdefault(key, {})[place] = new
        for changes in groups.values():
            yield Damage(path, changes)


def findings(
    emulator: Emulator, case: Callable[[], None], kind: str, seed: int = 0, step: int = 1
) -> Iterator[tuple[str, str]]:
    """Every damage of a kind or of any, or every `step`-th, in the kernels of a case, and what is found of it; ""
    if nothing."""
    emulator.reached.clear()
    with emulator.running():
        case()
    kinds, reached = KINDS if kind == ANY else [kind], dict(emulator.reached)
    for damage in [each for kind in kinds for each in damages(kind, reached)][::step]:
        problem = ""
        try:
            with emulator.running(seed, damage):
                case()
        except FOUND as error:
            problem = f"{type(error).__name__}: {error}"
        yield damage.told, problem


def sites_without_waits(
    emulator: Emulator, case: Callable[[], None], seed: int = 0
) -> Iterator[tuple[str, str]]:
    """Every place where a case waits for work on a GPU, and what is found if it does not; "" if nothing."""
    with emulator.running():
        case()
    for site in sorted(STREAMS.sites):
        problem = ""
        try:
            with emulator.running(seed, ignored=site):
                case()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        yield site, problem
