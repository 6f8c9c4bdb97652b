# SPDX-License-Identifier: Apache-2.0
"""What `doctor` and `check` say of carriers and their far stores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.pool.carrier.messages import Status as CarrierStatus
from pd_connector.pool.carrier.server import CarrierServer
from pd_connector.tools.cli.check import examine
from pd_connector.tools.cli.checks import carrier
from pd_connector.tools.cli.checks.facts import CarrierFacts
from pd_connector.tools.cli.checks.finding import Finding, Status

FAR = "redis://redis.example:6379"


def found(**facts: object) -> dict[str, Finding]:
    told = CarrierFacts(**facts)  # type: ignore[arg-type]
    return {each.name: each for each in carrier.findings(told, "KV pool")}


def test_a_carrier_that_serves_is_told_and_none_that_never_was() -> None:
    assert found() == {}
    (told,) = found(far=FAR, sealed=True).values()
    assert (told.status, told.found) == (Status.OK, f"{FAR}, sealed")


@pytest.mark.parametrize(
    ("facts", "name", "said", "advice"),
    [
        (
            {"far": FAR, "problem": "could not be opened: refused"},
            "carrier",
            "refused",
            "see that it runs",
        ),
        (
            {"far": FAR, "too_large": 3, "most_bytes": 128 << 20},
            "chunks",
            "128 MiB",
            "pool.codec: int8",
        ),
        ({"far": FAR, "not_put": 7}, "not put", "7 chunks", "allkeys-lru"),
        ({"has_ended": True}, "carrier", "none runs", "pd-connector pool carry"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(
    facts: dict[str, object], name: str, said: str, advice: str
) -> None:
    told = found(**facts)[name]
    assert told.status is Status.WARN
    assert said in told.found
    assert advice in told.advice


def test_the_address_in_the_environment_is_checked_and_its_password_is_not_shown(
    tmp_path: Path,
) -> None:
    facts = carrier.look(tmp_path, {"PD_CONNECTOR_FAR": "ftp://me:secret@h"})
    (told,) = carrier.findings(facts, "KV pool")
    assert told.status is Status.FAIL
    assert "PD_CONNECTOR_FAR: far store 'ftp' is not known" in told.found
    assert "secret" not in told.found
    assert carrier.look(tmp_path, {}) == CarrierFacts()


def in_script(tmp_path: Path, text: str) -> Finding:
    script = tmp_path / "start.sh"
    script.write_text(text)
    (told,) = [each for each in examine(str(script), {}).findings if each.name == "carrier"]
    return told


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--far ftp://h", "far store 'ftp' is not known"),
        ("--far redis://10.0.0.1:6379", "without a key only this machine's loopback"),
        ("--far=redis://:secret@10.0.0.1:6379", "without a key only this machine's loopback"),
        ("--far redis://h:6379x --key-file k", "is not an address"),
        ("--far redis://h/x --key-file k", "must be the number of a database"),
        ("--key-file k", "no far store is named"),
        ('--far redis://10.0.0.1\nrun(["pd-connector", "pool", "status"])', "without a key"),
    ],
)
def test_check_refuses_the_carrier_of_a_script(tmp_path: Path, command: str, said: str) -> None:
    told = in_script(tmp_path, f"pd-connector pool carry {command}\n")
    assert told.status is Status.FAIL
    assert said in told.found
    assert "secret" not in told.found


def test_check_refuses_a_key_file_that_is_open_to_others(tmp_path: Path) -> None:
    key = tmp_path / "pool.key"
    key.write_text("ab" * 32)
    key.chmod(0o644)
    command = f"pd-connector pool carry --far {FAR} --key-file {key}\n"
    told = in_script(tmp_path, command)
    assert told.status is Status.FAIL
    assert f"{key}: mode 644" in told.found
    assert "chmod 600" in told.found
    key.chmod(0o600)
    assert in_script(tmp_path, command).status is Status.OK


@pytest.mark.parametrize(
    "text",
    [
        f"pd-connector pool carry --far {FAR} --key-file /run/secrets/elsewhere\n",
        f'command: ["pd-connector", "pool", "carry", "--far", "{FAR}", "--key-file", "/run/k"]\n',
        f"PD_CONNECTOR_FAR={FAR} pd-connector pool carry --key-file /run/k\n",
        "pd-connector pool carry --far redis://127.0.0.1\n",
        "pd-connector pool carry --far $FAR --key-file /run/k\n",
    ],
)
def test_check_accepts_what_can_work(tmp_path: Path, text: str) -> None:
    assert in_script(tmp_path, text).status is Status.OK


def test_a_package_that_this_machine_lacks_is_a_warning_in_a_file_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_connector.pool.far.redis.redis", None)
    told = in_script(tmp_path, f"pd-connector pool carry --far {FAR} --key-file k\n")
    assert told.status is Status.WARN
    assert "pip install 'pd-connector[redis]'" in told.found


def test_a_package_that_another_python_has_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_connector.pool.far.redis.redis", None)
    command = f"pd-connector pool carry --far {FAR} --key-file k --client-python /opt/far/python\n"
    told = in_script(tmp_path, command)
    assert told.status is Status.OK
    assert "by a client of /opt/far/python" in told.found
    told = in_script(tmp_path, command.replace("redis.example:6379", "h:6379x"))
    assert told.status is Status.FAIL, "control: what is wrong in any Python"


def test_doctor_does_not_miss_a_package_while_a_carrier_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_connector.pool.far.redis.redis", None)
    environment = {"PD_CONNECTOR_FAR": FAR}
    folder = tmp_path / "pool"
    folder.mkdir(mode=0o700)
    assert "pip install" in carrier.look(folder, environment).refused, "control"
    served: Any = SimpleNamespace(status=lambda: CarrierStatus(far=FAR, sealed=True))
    serving = CarrierServer(served, folder)
    try:
        looked = carrier.look(folder, environment)
        assert (looked.far, looked.refused) == (FAR, "")
        wrong = {"PD_CONNECTOR_FAR": "ftp://h"}
        assert "not known" in carrier.look(folder, wrong).refused, "control"
    finally:
        serving.close()
