# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store between two hosts, with its own master and client, and a stranger beside them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pd_connector.errors import ConfigError
from pd_connector.pool.far import mooncake, mooncake_client
from pd_connector.pool.far.registry import far_address

ROOT = Path(__file__).parents[3]
here = pytest.mark.skipif(
    mooncake_client.MooncakeDistributedStore is None,
    reason="needs Mooncake's client (ci/setup-tests)",
)


def in_a_namespace(program: str, word: str, *arguments: str, timeout_s: float = 120) -> Any:
    """What a program of tests/support says after a word, run where nobody else can reach Mooncake."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root, for a network namespace")
    paths = [ROOT, ROOT / "tests", ROOT / "tests/pool/store", ROOT / ".venv/far"]
    ended = subprocess.run(
        ["unshare", "--net", sys.executable, str(ROOT / "tests/support" / program), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    lines = ended.stdout.splitlines()
    line = next((line for line in lines if line.startswith(f"{word} ")), "")
    assert line, ended.stdout + ended.stderr
    return json.loads(line.removeprefix(f"{word} "))


@here
@pytest.mark.netns
def test_faults_cost_misses_only() -> None:
    """`PD_POOL_FAULTS=1000` runs the long form, with nodes and masters that are killed."""
    faults = int(os.environ.get("PD_POOL_FAULTS", "3"))
    seen = in_a_namespace("mooncake_faults.py", "SEEN", str(faults), timeout_s=280 + 20 * faults)
    print(f"{faults} faults: {seen}")
    assert "wrong" not in seen
    assert seen["after"] == 4, "all is well afterwards"
    assert seen["longest_s"] < 60, "nobody waits without end"


@here
@pytest.mark.netns
def test_hosts_share_through_mooncake_and_a_stranger_causes_misses() -> None:
    found = in_a_namespace("mooncake_site.py", "FOUND")
    assert found["sealed"] == {
        "found": 6, "first": [3, 0], "changed": [0, 0], "damaged": 3, "left": 3,
    }  # fmt: skip
    # The control: without a seal what the stranger wrote comes into the pool.
    assert found["plain"]["changed"] == [3, 3]


@here
@pytest.mark.netns
def test_an_object_that_another_client_died_putting_is_not_taken_for_stored() -> None:
    seen = in_a_namespace("mooncake_unfinished.py", "SEEN", timeout_s=240)
    # The first is the control: Mooncake answers that it has stored the object.
    assert seen == {
        "answer of Mooncake": 0, "taken": [False], "there": [0], "afterwards": [8 << 20],
    }  # fmt: skip


@here
@pytest.mark.netns
def test_a_stranger_who_writes_into_the_memory_where_objects_land_causes_misses() -> None:
    """He writes between the end of a transfer and the reader's copy, then without end while it reads."""
    found = in_a_namespace("mooncake_landing.py", "FOUND")
    assert set(found["struck"]) == {"damaged"}
    assert found["left alone"] == ["right"]
    assert set(found["meanwhile"]) <= {"damaged", "right"}
    # The controls: without a seal, and opened where it has landed.
    assert found["plain"] == ["wrong"]
    assert found["in place"] == ["wrong"]


@here
@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("mooncake://", "names no master"),
        ("mooncake://user:pw@h", "Mooncake has none"),
        ("mooncake://h?protocol=udp", "must be tcp or rdma"),
        ("mooncake://h?proto=tcp", r"\?proto=: is not known"),
    ],
)
def test_a_wrong_address_is_refused(address: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        far_address(address, sealed=True)


@here
def test_without_a_key_even_loopback_is_refused() -> None:
    with pytest.raises(ConfigError, match="every address, on which Mooncake's client listens"):
        far_address("mooncake://127.0.0.1", sealed=False)
    far_address("mooncake://127.0.0.1", sealed=True)


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "MooncakeDistributedStore", None)
    monkeypatch.setattr(mooncake, "MISSING", "no libibverbs.so.1")
    with pytest.raises(ConfigError, match="apt install libibverbs1"):
        far_address("mooncake://h", sealed=True)
