# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md is true: its picture and table are those of the contracts, what it names is there."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted(
    [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
PLACES = ("pd_connector/", "scheduler_plugins/", "kernels/", "tests/", "docs/", "examples/", "ci/")


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    """docs/draw_architecture.py."""
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def test_the_picture_is_that_of_the_contracts(drawing: ModuleType) -> None:
    """Else: python docs/draw_architecture.py"""
    assert drawing.PICTURE.read_text() == drawing.picture()


def test_the_tables_are_those_of_the_contracts(drawing: ModuleType, page: str) -> None:
    """Else: python docs/draw_architecture.py"""
    assert page == drawing.with_tables(page)


def test_the_way_of_a_page_passes_through_both_sides_in_order(
    drawing: ModuleType, page: str
) -> None:
    steps = dict(drawing.steps(page))
    assert list(steps) == list(range(1, len(steps) + 1))
    passed = {file.split("/")[1] for file in steps.values()}
    assert {"vllm", "agent", "protocol", "plan", "pages", "codec", "transport", "memory"} <= passed


def test_every_word_is_explained_once(page: str) -> None:
    table = page.partition("## Words")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)[1:]
    words = [word.strip() for row in rows for word in row.split(",") if row != "---"]
    assert len(words) > 40
    assert sorted(words) == sorted(set(words))


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_files_and_functions_that_a_document_names_are_there(doc: Path) -> None:
    if doc.name == "CHANGELOG.md":
        pytest.skip("it tells what was, under the names of its time")
    missing = [name for name in re.findall(r"`([^`\s]+)`", doc.read_text()) if not there(name)]
    assert not missing


def there(name: str) -> bool:
    """Whether the repository has it, if it is a path, or a path with the name of something in it."""
    if not name.startswith(PLACES) or any(mark in name for mark in "*{<"):
        return True
    path, _, inside = name.partition(":")
    file = ROOT / path
    if not inside:
        return file.exists()
    return file.is_file() and inside in defined(ast.parse(file.read_text()))


def defined(tree: ast.AST, prefix: str = "") -> set[str]:
    """Functions, classes, methods (`Class.method`) and constants."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                found |= defined(node, f"{prefix}{node.name}.")
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                found.add(prefix + target.id)
    return found


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert there("pd_connector/errors.py:Cause")
    assert not there("pd_connector/errors.py:Reason")
    assert not there("pd_connector/error.py")


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{doc}: {link}"
        for doc in DOCS
        for link in re.findall(r"\]\(([^)#]+)", doc.read_text())
        if "://" not in link and not (doc.parent / link).exists()
    ]
    assert not broken
