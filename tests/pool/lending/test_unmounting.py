# SPDX-License-Identifier: Apache-2.0
"""A lender whose master stands still, or refuses: the memory is this host's again all the same."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from pd_connector.errors import ConfigError
from pd_connector.pool.lending import lender as lender_module
from pd_connector.pool.lending.lender import Lender, Recalled
from pd_connector.pool.lending.master import LateMasterError, SilentMasterError
from pd_connector.pool.settings import SHM_VARIABLE, text_of
from pd_connector.tools.cli import lend

PIECE = 64 << 20
FAR = "mooncake://h"


class SilentMaster:
    """It has answered once."""

    def __init__(self, *_: Any) -> None: ...

    def check(self) -> None: ...

    def segments(self) -> list[Any]:
        return []

    def start_drain(self, names: list[str]) -> str:
        raise SilentMasterError("it does not answer")


class Client:
    """A client of Mooncake. Unmounting waits for the master."""

    answers = threading.Event()
    made: ClassVar[list["Client"]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        Client.made.append(self)
        self.is_closed = False

    def allocate_and_mount_segment(self, nbytes: int) -> dict[str, Any]:
        return {"ret": 0, "segment_ids": ["id"]}

    def get_hostname(self) -> str:
        return "name"

    def unmount_and_free_segment(self, ids: list[str], grace_s: int) -> int:
        return 0 if Client.answers.wait(60) else -1

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lender_module, "Master", SilentMaster)
    monkeypatch.setattr(lender_module, "new_client", Client)
    Client.made.clear()
    Client.answers.clear()
    yield
    Client.answers.set()


def test_all_pieces_are_unmounted_at_once_and_no_longer_than_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lender_module, "_LEFT_S", 0.05)
    lender = Lender(urlsplit(FAR), PIECE, 1.0)
    lender.lend(3 * PIECE)
    recalled = lender.recall(PIECE, 0.05)
    assert (recalled.nbytes, recalled.is_known) == (0, False)
    assert lend._sentence(recalled, PIECE).startswith(
        "0 bytes recalled, 64 MiB are lent: 0 objects moved, 0 copied that were in use, an unknown number lost (it does not "
    )
    assert (lender.recalls, lender.unknown_recalls) == (1, 1)
    assert recalled.problem == (
        "it does not answer: what was in the memory may be lost; "
        f"the master has not answered yet: {text_of(2 * PIECE)} follow when it does"
    )
    recalled = lender.recall(0, 0.05)
    assert (recalled.nbytes, lender.nbytes) == (0, 0)


def test_a_master_that_answers_frees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    lender = Lender(urlsplit(FAR), PIECE, 1.0)
    lender.lend(3 * PIECE)
    monkeypatch.setattr(lender, "_drain", lambda *_: (7, True))
    Client.answers.set()
    assert lender.recall(0, 60) == Recalled(3 * PIECE, 7)
    assert all(client.is_closed for client in Client.made)


def test_a_master_that_stands_still_for_a_moment_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [LateMasterError("late"), LateMasterError("late"), None]
    late = [LateMasterError("late")]

    def segments(*_: Any) -> Any:
        if late:
            raise late.pop()
        return []

    def drain(*_: Any) -> Any:
        if answers and (error := answers.pop(0)):
            raise error
        return SimpleNamespace(
            is_over=True, status_name="SUCCEEDED", succeeded_units=5, active_units=0, message=""
        )

    monkeypatch.setattr(SilentMaster, "segments", segments)
    monkeypatch.setattr(SilentMaster, "start_drain", lambda *_: "1")
    monkeypatch.setattr(SilentMaster, "drain", drain, raising=False)
    lender = Lender(urlsplit(FAR), PIECE, 1.0)
    lender.lend(PIECE)
    Client.answers.set()
    assert lender.recall(0, 60) == Recalled(PIECE, 5)
    assert lender.unknown_recalls == 0


def test_objects_are_not_taken_for_gone_while_the_master_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mooncake's client knows neither: it answers nothing for both."""
    segment = SimpleNamespace(te_endpoint="here", segment_name="name", free_bytes=0, status="OK")
    place = SimpleNamespace(buffer_descriptor=SimpleNamespace(transport_endpoint="here", size=9))
    copy = SimpleNamespace(
        is_memory_replica=lambda: True,
        status=SimpleNamespace(name="COMPLETE"),
        get_memory_descriptor=lambda: place,
    )
    silent: list[SilentMasterError] = []

    def segments(*_: Any) -> Any:
        if silent:
            raise silent[0]
        return [segment]

    told: dict[str, Any] = {"a": [copy]}
    monkeypatch.setattr(SilentMaster, "segments", segments, raising=False)
    monkeypatch.setattr(SilentMaster, "keys", lambda *_: ["a", "b", ""], raising=False)
    monkeypatch.setattr(
        Client,
        "batch_get_replica_desc",
        lambda _, keys: {key: told[key] for key in keys if key in told},
        raising=False,
    )
    lender = Lender(urlsplit(FAR), PIECE, 1.0)
    lender.lend(PIECE)
    monkeypatch.setattr(lender, "_drain", lambda *_: (7, False))
    Client.answers.set()
    assert lender.recall(0, 60)[1:] == (7, 0, 1, "no other node has room for them", True)
    lender.lend(PIECE)
    told.clear()

    def keys(*_: Any) -> list[str]:
        silent.append(SilentMasterError("it does not answer"))  # from now on
        return ["a", "b", ""]

    monkeypatch.setattr(SilentMaster, "keys", keys, raising=False)
    recalled = lender.recall(0, 60)
    assert (recalled.moved, recalled.is_known) == (7, False)
    assert "what was in the memory may be lost" in recalled.problem


def test_a_signal_while_it_waits_for_the_master_ends_a_recall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler runs in the thread that waits, wherever that is."""
    lender = Lender(urlsplit(FAR), PIECE, 1.0)
    job = SimpleNamespace(is_over=False, active_units=1, succeeded_units=0)
    monkeypatch.setattr(SilentMaster, "start_drain", lambda *_: "1")
    monkeypatch.setattr(SilentMaster, "drain", lambda *_: job, raising=False)
    drains = threading.Thread(target=lender._drain, args=([], 1e6), daemon=True)

    def interrupted(waits: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any) -> Any:
            if threading.current_thread() is drains:
                lender.hurry()
            return waits(*arguments)

        return wait

    monkeypatch.setattr(threading.Condition, "wait", interrupted(threading.Condition.wait))
    monkeypatch.setattr(time, "sleep", interrupted(time.sleep))
    monkeypatch.setattr(lender_module, "_STUCK_S", 1e6)
    drains.start()
    drains.join(20)
    assert not drains.is_alive()


class Ended(BaseException):
    """`os._exit`, with its status."""


def ends(status: int) -> None:
    raise Ended(status)


@pytest.mark.parametrize("error", [ConfigError("refused"), RuntimeError("nobody thought of it")])
def test_a_command_that_fails_while_it_lends_recalls_and_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    """Mooncake has threads that do not end by themselves."""

    def failing(*_: Any) -> None:
        raise error

    def far_address(*_: Any, **__: Any) -> Any:
        return None, urlsplit(FAR)

    monkeypatch.setenv(SHM_VARIABLE, str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name, value in {
        "far_address": far_address,
        "_listening": failing,
        "_end_at": lambda _: 0,
    }.items():
        monkeypatch.setattr(lend, name, value)
    monkeypatch.setattr("os._exit", ends)
    Client.answers.set()
    with pytest.raises(Ended) as ended:
        lend.run("128MiB", FAR, 60.0, "")
    assert ended.value.args == (1,)
    told = capsys.readouterr()
    assert str(error) in told.err
    assert told.out.startswith("128 MiB recalled, 0 bytes are lent")
