# SPDX-License-Identifier: Apache-2.0
"""The client of a far store runs in the environment that a setting names, and nothing of this one is seen there."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chunks import chain, save
from support.far_hosts import KEY, Host
from support.redis_servers import redis_server
from support.waits import until

from pd_connector.errors import ConfigError
from pd_connector.pool.far.environment import command, problem_there
from pd_connector.pool.far.registry import far_address

pytest.importorskip("redis")


def python_without_this_package(folder: Path) -> str:
    """A Python that has this environment's packages, but for pd_connector and boto3."""
    path = folder / "python"
    hidden = "import sys; sys.path = [each for each in sys.path if each]"
    (folder / "sitecustomize.py").write_text(
        f"{hidden}\nsys.modules['boto3'] = sys.modules['pd_connector'] = None\n"
    )
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    path.chmod(0o700)
    return str(path)


def test_the_other_python_does_not_have_this_package(tmp_path: Path) -> None:
    """The control."""
    python = python_without_this_package(tmp_path)
    ended = subprocess.run(
        [python, "-c", "import pd_connector"], capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError" in ended.stderr or "ImportError" in ended.stderr


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_chunks_pass_through_a_client_of_another_python(tmp_path: Path, shm: Path) -> None:
    python = python_without_this_package(tmp_path)
    with redis_server(tmp_path) as redis:
        far_address(redis.address, sealed=True, python=python)
        host = Host(shm, redis.address, (KEY,), 64 << 20, 5.0, python)
        try:
            host.ready()
            save(host.own, chain("prompt", 2))
            until(lambda: host.count("put") == 2, "the chunks in Redis", 60)
            program = Path(f"/proc/{host.carrier.children()[0]}/cmdline").read_bytes()
            assert b"runpy" in program
        finally:
            host.close()


def test_an_address_is_checked_where_its_client_is(tmp_path: Path) -> None:
    python = python_without_this_package(tmp_path)
    assert not problem_there(python, "redis://localhost")
    assert "needs the package boto3" in problem_there(python, "s3://pool")
    with pytest.raises(ConfigError, match="needs the package boto3"):
        far_address("s3://pool", sealed=True, python=python)


def test_a_python_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--client-python /absent: cannot be started"):
        problem_there("/absent", "redis://localhost")
    with pytest.raises(ConfigError, match="/bin/true: cannot be used"):
        problem_there("/bin/true", "redis://localhost")
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho 'no msgspec' >&2; exit 1\n")
    path.chmod(0o700)
    with pytest.raises(ConfigError, match=r"cannot be used \(no msgspec\).*3.11"):
        problem_there(str(path), "redis://localhost")


def test_without_the_setting_the_client_runs_in_this_python() -> None:
    assert command("", "module", "1") == [sys.executable, "-m", "module", "1"]
