# SPDX-License-Identifier: Apache-2.0
"""A library that a thread imports in the middle of a test run adds loggers; pytest's walk through them goes on."""

import itertools
import logging

import pytest
from _pytest.logging import LogCaptureHandler, catching_logs


class _Imports(logging.Logger):
    """Makes another logger whenever it is looked at, as a thread that imports something can."""

    others = itertools.count()

    @property
    def propagate(self) -> bool:
        logging.getLogger(f"test.made_meanwhile.{next(self.others)}")
        return True

    @propagate.setter
    def propagate(self, _: bool) -> None: ...


def test_a_logger_may_be_made_while_pytest_walks_through_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = logging.root.manager
    with monkeypatch.context() as patch:
        patch.setitem(manager.loggerDict, "test.imports", _Imports("test.imports"))
        with catching_logs(LogCaptureHandler()):
            pass
        assert "test.made_meanwhile.0" in manager.loggerDict

        patch.setattr(manager, "loggerDict", dict(manager.loggerDict))
        with pytest.raises(RuntimeError, match="changed size"), catching_logs(LogCaptureHandler()):
            pass
