# SPDX-License-Identifier: Apache-2.0
"""Names of modules in strings, which no import would check: they stay right when a module moves."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = {
    "pd_connector": "pd_connector",
    "scheduler_plugins": "scheduler_plugins",
    "pd_kernels": "kernels/pd_kernels",
}
ROOT = Path(__file__).parents[2]
NAME = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z_]\w*)+(?::\w+)?")
FILES = sorted(file for folder in PACKAGES.values() for file in (ROOT / folder).rglob("*.py"))
PROGRAMS = sorted(
    ".".join([package, *file.parent.relative_to(ROOT / folder).parts])
    for package, folder in PACKAGES.items()
    for file in (ROOT / folder).rglob("__main__.py")
)


@pytest.fixture(scope="module")
def project() -> dict:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def groups(project: dict) -> set[str]:
    """Groups of entry points: names like those of modules, which stand for none."""
    documented = (ROOT / "pd_connector" / "extensions.py").read_text()
    return set(project["project"]["entry-points"]) | set(
        re.findall(r"^\| `(\S+)` \|", documented, re.M)
    )


def strings() -> Iterator[tuple[Path, str]]:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and NAME.fullmatch(text):
                yield file, text


def source_of(module: str) -> Path | None:
    package, _, rest = module.partition(".")
    place = ROOT / PACKAGES[package] / rest.replace(".", "/")
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


def stands_for_something(name: str) -> bool:
    """Whether it is a module, or something that a module has at its top level."""
    module, _, attribute = name.partition(":")
    if not attribute and source_of(module):
        return True
    if not attribute:
        module, _, attribute = module.rpartition(".")
    source = source_of(module)
    return source is not None and attribute in defined(source)


def defined(source: Path) -> set[str]:
    """Names at the top level of a module, and those that it finds when they are asked for."""
    found: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        match node:
            case ast.FunctionDef(name="__getattr__"):
                found |= {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found |= {one.asname or one.name for one in node.names}
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                found |= set(ast.literal_eval(node.value))
            case ast.Assign():
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


def test_every_name_of_ours_in_a_string_stands_for_something(project: dict) -> None:
    known = groups(project)
    found = [(file, name) for file, name in strings() if name not in known]
    assert len(found) > 10
    wrong = [f"{file}: {name}" for file, name in found if not stands_for_something(name)]
    assert not wrong


def test_every_name_of_ours_in_a_document_stands_for_something(project: dict) -> None:
    """CHANGELOG.md tells what was, under the names of its time."""
    known = groups(project) | {"pd_kernels.paged_decode"}  # as a line in the log has it
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    found = {
        (file.name, name)
        for file in files
        for name in re.findall(rf"(?<![\w/.-])({NAME.pattern})", file.read_text())
        if name not in known and not name.endswith((".md", ".py"))
    }
    assert len(found) > 30
    assert not sorted(f"{file}: {name}" for file, name in found if not stands_for_something(name))


def test_a_name_that_has_moved_is_noticed() -> None:
    assert stands_for_something("pd_connector.tools.cli.demo:demo")
    assert not stands_for_something("pd_connector.tools.cli.demo:nothing")
    assert not stands_for_something("pd_connector.cli.demo")


def test_every_entry_point_stands_for_something(project: dict) -> None:
    points = [
        value for group in project["project"]["entry-points"].values() for value in group.values()
    ]
    points += project["project"]["scripts"].values()
    assert not [point for point in points if not stands_for_something(point)]


def test_modules_that_settings_name_are_there(project: dict) -> None:
    tool = project["tool"]
    named = [name for one in tool["mypy"]["overrides"] for name in one["module"]]
    named += [name for name in tool["setuptools"]["package-data"] if name != "*"]
    own = [name.removesuffix(".*") for name in named if name.split(".")[0] in PACKAGES]
    assert own
    assert not [name for name in own if not source_of(name)]
    paths = [*tool["mypy"]["files"], *tool["pytest"]["ini_options"]["pythonpath"]]
    assert not [path for path in paths if not (ROOT / path).is_dir()]


def test_folders_that_the_makefile_names_are_there() -> None:
    words = re.findall(r"\btests/[\w/.]+", (ROOT / "Makefile").read_text())
    assert words
    assert not [word for word in words if not (ROOT / word).exists()]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_starts(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", program, "--help"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "usage" in ended.stdout.lower()


def test_every_module_that_is_started_by_name_is_a_program() -> None:
    """Those that another process starts (`-m`), in the code and the documentation. The changelog tells what was."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    texts = [*FILES, *(page for page in pages if page.name != "CHANGELOG.md")]
    names = {
        name
        for file in texts
        for name in re.findall(rf'-m",? "?({NAME.pattern})', file.read_text())
    }
    names |= {
        name
        for file in texts
        for name in re.findall(rf"python3? -m ({NAME.pattern})", file.read_text())
    }
    assert len(names) >= 2

    def is_program(name: str) -> bool:
        source = source_of(name)
        if source is None:
            return False
        return name in PROGRAMS or '__name__ == "__main__"' in source.read_text()

    assert not [name for name in names if not is_program(name)]


def test_names_that_vllms_flags_ask_for_are_found() -> None:
    """`--scheduler-cls` and `--middleware`: the package finds both lazily."""
    import scheduler_plugins.vllm as door

    assert set(door._HOMES) == set(door.__all__)
    assert all(stands_for_something(f"{home}:{name}") for name, home in door._HOMES.items())
