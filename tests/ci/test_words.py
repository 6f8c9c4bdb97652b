# SPDX-License-Identifier: Apache-2.0
"""`ci/words`: hard sentences, and old names that code binds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORDS = Path(__file__).parents[2] / "ci/words"
ROOM = "scheduler_plugins/queue"


def problems(folder: Path, path: str, source: str) -> list[str]:
    """What `ci/words` prints for a repository with this file."""
    (folder / "ci").mkdir()
    shutil.copy(WORDS, folder / "ci")
    file = folder / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    checked = subprocess.run(
        [sys.executable, "ci/words", path],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert not checked.stderr
    return checked.stdout.splitlines() if checked.returncode else []


@pytest.mark.parametrize(
    "source",
    [
        "told = 1",
        "for one in (): pass",
        "def route(wanted): pass",
        "def _known(): pass",
        "class Page:\n    def read(self): self.asked = 1",
        "found: int = 1",
    ],
)
def test_an_old_name_is_refused_where_it_is_bound(tmp_path, source):
    [problem] = problems(tmp_path, f"{ROOM}/room.py", source)
    assert problem.startswith(f"{ROOM}/room.py:")
    assert "write" in problem


def test_a_name_of_another_library_can_be_read(tmp_path):
    assert not problems(tmp_path, f"{ROOM}/room.py", "print(library.found, library.told())")


def test_an_old_name_passes_where_nothing_was_renamed(tmp_path):
    assert not problems(tmp_path, "tests/test_room.py", "told = 1")


def test_a_name_on_the_wire_keeps_its_name(tmp_path):
    assert not problems(tmp_path, "scheduler_plugins/cost/model.py", "known: int = 1")


def test_a_hard_sentence_is_found(tmp_path):
    [problem] = problems(tmp_path, f"{ROOM}/room.py", '"""Of two engines, the first."""')
    assert "begins with 'Of'" in problem
