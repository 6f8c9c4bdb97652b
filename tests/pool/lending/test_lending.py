# SPDX-License-Identifier: Apache-2.0
"""Memory that is lent to Mooncake and recalled, with Mooncake's own master and clients."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_connector.pool.far import mooncake_client
from pd_connector.pool.lending.lender import LEAST_PIECE, PIECES, piece_bytes
from pd_connector.pool.settings import SHM_VARIABLE

ROOT = Path(__file__).parents[3]
CLIENTS = str(ROOT / ".venv/far")
here = pytest.mark.skipif(
    mooncake_client.MooncakeDistributedStore is None,
    reason="needs Mooncake's client (ci/setup-tests)",
)


@here
@pytest.mark.netns
def test_half_of_the_memory_is_recalled_and_hot_objects_stay() -> None:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root, for a network namespace")
    paths = [ROOT, ROOT / "tests", CLIENTS]
    ended = subprocess.run(
        ["unshare", "--net", sys.executable, str(ROOT / "tests/support/mooncake_lenders.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
    )
    line = next((line for line in ended.stdout.splitlines() if line.startswith("FOUND ")), "")
    assert line, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    assert found["ready"].startswith("lending 256 MiB to mooncake://127.0.0.1:")
    assert found["half"].startswith("128 MiB recalled, 128 MiB are lent: ")
    assert "lost" not in found["half"]
    assert found["freed"] > 0
    assert found["absent"] == 0
    metrics = found["metrics"]
    assert metrics["pd_connector:lender_lent_bytes"] == 128 << 20
    assert metrics["pd_connector:lender_recalls_total"] == 1
    assert metrics["pd_connector:lender_unknown_recalls_total"] == 0
    assert metrics["pd_connector:lender_recalled_bytes_total"] == 128 << 20
    objects = "pd_connector:lender_recalled_objects_total"
    moved, copied = metrics[f'{objects}{{cause="moved"}}'], metrics[f'{objects}{{cause="copied"}}']
    assert f"{moved:.0f} objects moved, {copied:.0f} copied" in found["half"]
    assert metrics[f'{objects}{{cause="lost"}}'] == 0
    # The rest, at the end of the process.
    assert found["end"] == 0
    assert found["rest"].startswith("128 MiB recalled, 0 bytes are lent: ")
    assert found["absent_then"] == 0
    # Readers went on meanwhile. A read that is under way while a piece is unmounted may fail, and is not wrong.
    assert found["rounds"] > 1
    assert found["wrong"] == 0
    # The control: a drain alone loses what is in use.
    assert found["control"] > 0, "not 4 on a busy machine: a reader that stands still loses a lease"
    # The last node has nowhere to put what it has, and says so.
    assert "no other node has room for them" in found["alone"]


@pytest.mark.parametrize("memory", [LEAST_PIECE, 100 << 20, 1 << 30, 64 << 30, (64 << 30) + 12345])
def test_pieces_are_few_and_not_small(memory: int) -> None:
    piece = piece_bytes(memory)
    assert piece >= LEAST_PIECE
    assert piece % (16 << 20) == 0
    assert memory // piece <= PIECES
    assert memory < LEAST_PIECE * PIECES or memory // piece >= PIECES - 1


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    shm = tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm")
    yield {**os.environ, SHM_VARIABLE: shm, "PYTHONPATH": CLIENTS}
    shutil.rmtree(shm)


def lend(environment: dict[str, str], *arguments: str) -> str:
    """What the command says, which must fail."""
    command = [sys.executable, "-m", "pd_connector", "pool", "lend", *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode
    return " ".join((ended.stdout + ended.stderr).split())


@here
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--memory", "64"], "must be a size such as 64GiB"),
        (["--memory", "1MiB"], "must be 64 MiB or more"),
        (["--memory", "0GiB"], "lends nothing"),
        (["--memory", "8000TiB"], "ask for less"),
        (["--memory", "64MiB", "--far", "mooncake://h?admin=x"], "?admin=x: must be the port"),
    ],
)
def test_what_cannot_be_lent_is_refused_by_name(
    environment: dict[str, str], arguments: list[str], found: str
) -> None:
    assert found in lend({**environment, "PD_CONNECTOR_FAR": "mooncake://127.0.0.1"}, *arguments)


@pytest.mark.parametrize(
    ("far", "found"),
    [("redis://127.0.0.1", "memory is lent to Mooncake only"), ("", "must begin with a scheme")],
)
def test_another_store_is_refused(environment: dict[str, str], far: str, found: str) -> None:
    pytest.importorskip("redis")
    assert found in lend(environment, "--memory", "64MiB", "--far", far)


@here
def test_a_master_that_is_not_there_is_named(environment: dict[str, str]) -> None:
    with socket.socket() as bound:  # not listening
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        told = lend(environment, "--memory", "64MiB", "--far", f"mooncake://127.0.0.1?admin={port}")
    assert f"http://127.0.0.1:{port} does not answer" in told
    assert "?admin=PORT" in told
