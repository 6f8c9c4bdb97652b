# SPDX-License-Identifier: Apache-2.0
"""Counts small errors in the code that the tests find: `python ci/mutants.py [--seed 1] [--count 60]`.

Each mutant is one change of one expression, chosen by the seed: a comparison, a sum, a number, a condition. The tests
of its room run in a copy of the tree until one fails or takes too long. The same seed makes the same mutants of the
same code, so two suites can be compared. Prints a line for each mutant, with the test that found it, and the sum by
room. A missed mutant is a missing test, or equal to the code: read it.
"""

from __future__ import annotations

import argparse
import ast
import collections
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOMS = {
    "pd_connector/plan": "tests/plan",
    "pd_connector/protocol": "tests/protocol",
    "pd_connector/agent": "tests/agent",
    "scheduler_plugins/router/request": "tests/scheduler_plugins/router/request",
}
"""The code to change, and the tests that mirror it."""
TEST_S = 300
FOLDER_S = 1800
"""A mutant that hangs is found: the longest time of one test, and of a folder's tests."""
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Mutant(NamedTuple):
    """One change of one file."""

    path: Path  # in the tree
    line: int
    before: str
    after: str
    source: str  # the whole changed file


def changed(node: ast.AST) -> ast.AST | None:
    """The node with one error; None if its kind is never changed."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in OPERATORS:
            return ast.Compare(node.left, [OPERATORS[type(operator)]()], node.comparators)  # type: ignore[list-item]
        case ast.BinOp() if type(node.op) in OPERATORS:
            return ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)  # type: ignore[arg-type]
        case ast.BoolOp():
            return ast.BoolOp(OPERATORS[type(node.op)](), node.values)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value)):
            return ast.Constant(value + 1)
    return None


def mutants(path: Path) -> Iterator[Mutant]:
    """All mutants of a file, except in type hints, decorators and arguments of classes (`frozen=True`), which no test
    could see."""
    source = (ROOT / path).read_text()
    tree = ast.parse(source)
    hints = {id(part) for node in ast.walk(tree) for part in _hints(node)}
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for node in ast.walk(tree):
        other = None if id(node) in hints else changed(node)
        if other is None or not isinstance(node, ast.expr):
            continue
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        text = f"({ast.unparse(other)})"
        whole = source.encode()[:first] + text.encode() + source.encode()[last:]
        yield Mutant(path, node.lineno, ast.unparse(node), text, whole.decode())


def _hints(node: ast.AST) -> Iterator[ast.AST]:
    hints = [getattr(node, name, None) for name in ("annotation", "returns")]
    for hint in [*hints, *getattr(node, "decorator_list", ())]:
        yield from ast.walk(hint) if hint is not None else ()
    if isinstance(node, ast.ClassDef):
        for keyword in node.keywords:
            yield from ast.walk(keyword)


def sample(seed: int, count: int) -> list[tuple[str, Mutant]]:
    """The same number of mutants from each room."""
    choose = random.Random(seed)
    found = []
    for room in ROOMS:
        files = sorted(path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py"))
        known = [mutant for path in files for mutant in mutants(path)]
        found += [(room, one) for one in choose.sample(known, min(len(known), count // len(ROOMS)))]
    return found


def found_by(tree: Path, room: str, mutant: Mutant) -> str | None:
    """The test that finds a mutant; None if it is missed. Tests with the name of its file run first: they are few."""
    near = [str(path.relative_to(tree)) for path in (tree / ROOMS[room]).rglob("test_*.py")]
    near = sorted(path for path in near if mutant.path.stem in path)
    return (failing(tree, *near) if near else None) or failing(tree, ROOMS[room])


def failing(tree: Path, *tests: str) -> str | None:
    """The first failing test of these folders or files; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-n", "2"]
    command += ["--dist", "loadfile", "-m", "not engine and not quiet", f"--timeout={TEST_S}"]
    paths = os.pathsep.join((str(tree), str(tree / "kernels")))
    # Otherwise a mutant of equal size, made within the same second, would not be compiled again.
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    running = subprocess.Popen(
        [*command, *tests],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        told, _ = running.communicate(timeout=FOLDER_S)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        return f"{tests}: not over after {FOLDER_S} s"
    if running.returncode == 0:
        return None
    failed = [line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"{tests}: {told.splitlines()[-1:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--room", choices=ROOMS, help="only this one")
    given = parser.parse_args()
    made, seen = collections.Counter[str](), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        rooms = [given.room] if given.room else list(ROOMS)
        for room in rooms:
            if (test := failing(tree, ROOMS[room])) is not None:
                sys.exit(f"without any mutant, {test}: nothing would be learnt")
        for room, mutant in sample(given.seed, given.count):
            if room not in rooms:
                continue
            file = tree / mutant.path
            right = file.read_text()
            file.write_text(mutant.source)
            test = found_by(tree, room, mutant)
            file.write_text(right)
            made[room] += 1
            seen[room] += test is not None
            print(
                f"{'MISSED' if test is None else 'found'}  {mutant.path}:{mutant.line}  "
                f"{mutant.before}  ->  {mutant.after}  {test or ''}",
                flush=True,
            )
    for room in rooms:
        print(f"{room}: {seen[room]} of {made[room]} found")


if __name__ == "__main__":
    main()
