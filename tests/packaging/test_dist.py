# SPDX-License-Identifier: Apache-2.0
"""What `make dist` leaves works by itself: the wheel, the source distribution, the site and the image's context."""

import fnmatch
import re
import shutil
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.wheels import PIP, ROOT, installed, run

DOCKERFILE = "examples/deploy/Dockerfile"
PACKAGES = ("pd_connector", "scheduler_plugins", "kernels")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, made by the script that `make dist` runs."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone, which distributions are made in")
    folder = tmp_path_factory.mktemp("dist")
    run([ROOT / "ci/dist", folder])
    return folder


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def passed(context: Path, folder: Path) -> Path:
    """What `COPY . folder` brings of a context: all that its .dockerignore, read as a list of exceptions, lets pass."""
    lines = (context / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    deep = [rule.removeprefix("**/") for rule in rules[1:] if not rule.startswith("!")]
    folder.mkdir()
    for name in (rule[1:] for rule in rules[1:] if rule.startswith("!")):
        source = context / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns(*deep))
        else:
            shutil.copy(source, folder / name)
    return folder


def folders(names: list[str]) -> set[str]:
    return {str(parent) for name in names for parent in Path(name).parents}


def instructions() -> list[tuple[str, str]]:
    """Name and words of each instruction of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (ROOT / DOCKERFILE).read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line]


def test_there_are_four_things_and_nothing_else(dist: Path) -> None:
    names = sorted(path.name for path in dist.iterdir())
    for name, pattern in zip(names, ["image", "*.whl", "*.tar.gz", "site"], strict=True):
        assert fnmatch.fnmatch(name, pattern)


def test_the_wheel_works_where_nothing_of_the_clone_is(dist: Path, tmp_path: Path) -> None:
    """It was built from the source distribution."""
    commands = installed(only(dist, "*.whl"), tmp_path / "environment")
    config = '{"kv_connector": "PDConnector", "kv_role": "kv_producer"}'
    run([commands / "pd-connector", "check", config])
    run([commands / "pd-router", "--help"])


def test_the_site_has_every_page(dist: Path) -> None:
    pages = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    names = {
        page.with_name("index.html") if page.stem == "README" else page.with_suffix(".html")
        for page in pages
    }
    assert not [name for name in names if not (dist / "site" / name).is_file()]


def test_the_image_has_what_its_dockerfile_copies_and_installs(dist: Path, tmp_path: Path) -> None:
    ((source, place),) = [words.split() for name, words in instructions() if name == "COPY"]
    (ran,) = [words for name, words in instructions() if name == "RUN"]
    assert source == "."
    assert f"{place}[router]" in ran
    there = passed(dist / "image", tmp_path / "copied")
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, there])
    built, wheel = (ZipFile(only(folder, "*.whl")).namelist() for folder in (tmp_path, dist))
    assert sorted(built) == sorted(wheel)


def test_a_clone_s_image_has_the_same_and_no_environment(dist: Path, tmp_path: Path) -> None:
    """Gigabytes of .venv were sent and copied."""
    image, clone = (
        {str(path.relative_to(folder)) for path in folder.rglob("*")}
        for folder in (passed(dist / "image", tmp_path / "image"), passed(ROOT, tmp_path / "clone"))
    )
    assert image <= clone
    untracked = subprocess.check_output(
        ["git", "ls-files", "-o", "--", *PACKAGES], cwd=ROOT, text=True
    ).splitlines()
    assert clone - image <= {str(Path(name)) for name in untracked} | folders(untracked)
    assert (dist / "image" / DOCKERFILE).read_bytes() == (ROOT / DOCKERFILE).read_bytes()
