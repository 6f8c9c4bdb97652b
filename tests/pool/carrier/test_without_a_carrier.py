# SPDX-License-Identifier: Apache-2.0
"""Where no carrier serves, a store says and waits as that of one host."""

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from chunks import chain, save, there
from support.waits import until

from pd_connector.pool.carrier import asking, server
from pd_connector.pool.carrier.asking import FIND_S, CarrierLink
from pd_connector.pool.carrier.messages import SOCKET, Status, new_socket
from pd_connector.pool.carrier.server import CarrierServer
from pd_connector.pool.store.local import LocalStore, Space
from pd_connector.pool.store.reaching import ReachingStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReachingStore]:
    folder = tmp_path / ("long" * 40)  # a socket's path may have 107 bytes
    store = ReachingStore(LocalStore(Space(folder, 64 << 20)), folder)
    yield store
    store.close()


def test_a_missing_chunk_is_missing(store: ReachingStore) -> None:
    keys = chain("x", 3)
    save(store, keys[:2])
    for _ in range(2):
        assert there(store, keys) == 2
        assert store.bring(keys[2]) is None
        assert store.bring(keys[0])
    assert store.pin(keys, 1.0) == 2
    assert store.carrier.status() is None
    assert not store.reaches_far


def test_after_a_carrier_has_ended_in_order_it_is_known_that_there_was_one(
    store: ReachingStore, tmp_path: Path
) -> None:
    CarrierServer(None, next(tmp_path.iterdir())).close()  # type: ignore[arg-type]
    assert store.reaches_far


def test_after_the_folder_was_removed_a_carrier_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_LOOKS_EVERY_S", 0.02)
    monkeypatch.setattr(asking, "_LOOKS_AGAIN_S", 0.02)
    folder = tmp_path / "pool"
    folder.mkdir()
    carrier = SimpleNamespace(status=lambda: Status(far="", sealed=True))
    serving, link = CarrierServer(carrier, folder), CarrierLink(folder)  # type: ignore[arg-type]
    try:
        assert link.status(), "control"
        shutil.rmtree(folder)
        for channel in list(serving._connections):
            channel.shutdown(socket.SHUT_RDWR)
        assert not link.status()
        folder.mkdir()
        until(link.status, "the carrier, in the new folder")
    finally:
        link.close()
        serving.close()


def test_a_socket_that_a_dead_carrier_has_left_is_none(
    store: ReachingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(next(tmp_path.iterdir()))
    with new_socket() as left:
        left.bind(SOCKET)
    began_s = time.monotonic()
    for _ in range(200):
        assert store.bring(chain("y", 1)[0]) is None
        assert there(store, chain("y", 1)) == 0
    assert time.monotonic() - began_s < 200 * FIND_S / 2


def test_a_carrier_that_notes_no_request_is_left_alone(
    store: ReachingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "FIND_S", 0.02)
    monkeypatch.chdir(next(tmp_path.iterdir()))
    with new_socket() as silent:
        silent.bind(SOCKET)
        silent.listen()
        store.prefetch(chain("y", 2))
        assert not store.carrier._answers.waited_for
        store.prefetch(chain("y", 2))
