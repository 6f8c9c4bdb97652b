# SPDX-License-Identifier: Apache-2.0
"""A report that was kept is used as long as nothing has changed that it was made of."""

from pathlib import Path

import compiled_reports
import pytest
from compiled_reports import compiled_report

COMMAND = Path("made_up_aot.py")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How often the compiler was asked, in a tree of one kernel with no cache but this test's."""
    calls: list[int] = []
    kernel = tmp_path / "kernels" / "pd_kernels" / "copy.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("one")
    monkeypatch.setattr(compiled_reports, "ROOT", tmp_path)
    monkeypatch.setattr(
        compiled_reports, "_compile", lambda *_: {"number": calls.append(1) or len(calls)}
    )
    return calls


class Config:
    """What is read of pytest's: a cache."""

    def __init__(self) -> None:
        self.cache = self
        self._kept: dict[str, object] = {}

    def get(self, key: str, default: object) -> object:
        return self._kept.get(key, default)

    def set(self, key: str, value: object) -> None:
        self._kept[key] = value


def test_a_kernel_that_has_changed_is_compiled_again(made: list[int], tmp_path: Path) -> None:
    config = Config()
    assert compiled_report(config, COMMAND) == compiled_report(config, COMMAND) == {"number": 1}
    (tmp_path / "kernels" / "pd_kernels" / "copy.py").write_text("two")
    assert compiled_report(config, COMMAND) == compiled_report(config, COMMAND) == {"number": 2}


def test_another_compiler_and_other_kernels_make_another_report(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config()
    compiled_report(config, COMMAND)
    compiled_report(config, COMMAND, ["copy"])
    compiled_report(config, COMMAND, ["copy"], Path("triton-3.6.0"))
    monkeypatch.setattr(compiled_reports, "_version", lambda name: f"{name} 99")
    compiled_report(config, COMMAND)
    assert len(made) == 4
