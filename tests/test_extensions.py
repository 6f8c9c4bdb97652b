# SPDX-License-Identifier: Apache-2.0
"""What other packages add by entry points."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.distributions import add_distribution

GROUP = "pd_connector.toys"
_PROGRAM = """
import sys
from pd_connector.extensions import load_entry_points, unknown_name

found = load_entry_points("pd_connector.toys")
print("names", *found)
print("imported", "toy_module" in sys.modules)
for name in found:
    try:
        print(name, found[name].load(), found[name].load() is found[name].load())
    except Exception as error:
        print(name, type(error).__name__, error)
print(unknown_name("toy", "tyo", ["ours"], "pd_connector.toys", "toys"))
"""


def run(*folders: Path) -> str:
    """What the program says with these folders on the path."""
    program = "import sys; sys.path[:0] = sys.argv[1:]\n" + _PROGRAM
    command = [sys.executable, "-c", program, *map(str, folders)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_an_added_object_is_found_by_name_and_imported_when_it_is_used_and_once(tmp_path):
    source = "class Made:\n    def __repr__(self): return 'made'\n\nmade = Made()\n"
    add_distribution(tmp_path, "toy", {"toy_module": source}, {GROUP: {"one": "toy_module:made"}})
    said = run(tmp_path).splitlines()
    assert said[:3] == ["names one", "imported False", "one made True"]
    assert "toy 'tyo' is not known: there are ours, one (config key toys)" in said[3]


def test_an_addition_that_cannot_be_imported_names_its_package(tmp_path):
    modules = {"toy_module": "raise RuntimeError('no such device')"}
    add_distribution(tmp_path, "broken-toy", modules, {GROUP: {"one": "toy_module:made"}})
    said = run(tmp_path)
    assert "ConfigError" in said
    assert "package 'broken-toy' (toy_module:made)" in said
    assert "no such device" in said


@pytest.mark.parametrize("alike", [True, False])
def test_two_packages_under_one_name_are_refused_unless_they_name_the_same_object(tmp_path, alike):
    for number in (1, 2):
        value = "toy_module:made" if alike else f"toy_module:made{number}"
        modules = {"toy_module": "made = made1 = made2 = 7"}
        folder = tmp_path / str(number)
        add_distribution(folder, f"toy-{number}", modules, {GROUP: {"one": value}})
    said = run(tmp_path / "1", tmp_path / "2")
    if alike:
        assert "one 7 True" in said
    else:
        assert "package 'toy-1'" in said
        assert "package 'toy-2'" in said
        assert "uninstall one of them" in said
