# SPDX-License-Identifier: Apache-2.0
"""The same versions are supported wherever one is named."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from pd_connector.tools.cli.checks import software
from pd_connector.tools.cli.checks.facts import Facts, Software
from pd_connector.tools.cli.checks.finding import Status
from pd_connector.versions import PYTHON, SGLANG, VLLM, python_advice, seen, supported_range

ROOT = Path(__file__).parents[1]
MINORS = range(PYTHON[0][1], PYTHON[1][1] + 1)


@pytest.mark.parametrize("minor", range(9, 17))
def test_a_python_is_accepted_everywhere_or_nowhere(minor: int) -> None:
    wanted = minor in MINORS
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert (f"3.{minor}.1" in SpecifierSet(project["requires-python"])) is wanted
    classifier = f"Programming Language :: Python :: 3.{minor}"
    assert (classifier in project["classifiers"]) is wanted
    facts = Facts(software=Software(python=(3, minor, 1)))
    assert (software.python(facts).status is Status.OK) is wanted
    setup = (ROOT / "ci" / "setup").read_text()
    bounds = re.search(r"\((\d+), (\d+)\) <= sys\.version_info\[:2\] <= \((\d+), (\d+)\)", setup)
    assert bounds
    first, last = tuple(map(int, bounds.groups()[:2])), tuple(map(int, bounds.groups()[2:]))
    assert (first <= (3, minor) <= last) is wanted
    assert (f"python3.{minor} " in setup) is wanted


def test_documents_name_the_same_pythons() -> None:
    first, last = (".".join(map(str, one)) for one in PYTHON)
    for name in ("docs/quickstart.md", "ci/setup", "ci/release"):
        assert f"Python {first} to {last}" in (ROOT / name).read_text(), name
    assert python_advice((3, 14, 0)) == f"{first} to {last} are supported"


def test_the_front_page_names_the_supported_engines() -> None:
    page = (ROOT / "README.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| vLLM |"))
    for major, minor in VLLM:
        assert f"{major}.{minor}" in row
    assert all(version in page for version in SGLANG)


def test_the_doctor_says_what_was_done_with_a_version_and_the_bounds() -> None:
    found = software.engines(Facts(software=Software(versions={"vllm": "0.33.1"})))[0]
    first, last = supported_range()
    assert found.found == f"vllm 0.33.1 ({seen('0.33.1')}; {first} to {last} are supported)"
    assert "on the CPU kernels of 0.32" in found.found
    assert seen("0.30.0") == ""
