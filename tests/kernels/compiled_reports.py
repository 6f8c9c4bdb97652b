# SPDX-License-Identifier: Apache-2.0
"""Reports of compiled kernels: made by a program of their own, because kernels are interpreted in the process
of the tests, and kept, because a compilation takes up to a minute."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("kernels/pd_kernels/**/*.py", "pd_connector/kv/**/*.py", "tests/kernels/*_aot.py")
"""What a report is made of, besides the compiler."""


def compiled_report(
    config: pytest.Config, command: Path, names: Sequence[str] = (), triton: Path | None = None
) -> dict[str, Any]:
    """What `command` prints, as it was kept in pytest's cache if nothing has changed since.

    Args:
        names: kernels that it is asked for; none for all of its own.
        triton: folder of another Triton than this environment's.
    """
    key = "/".join(("pd_kernels", command.stem, triton.name if triton else "triton"))
    made_of = _digest(ROOT, [*names, _version("triton"), _version("torch")])
    kept = config.cache.get(key, None) if config.cache else None
    if kept is None or kept["made_of"] != made_of:
        kept = {"made_of": made_of, "report": _compile(command, names, triton)}
        if config.cache:
            config.cache.set(key, kept)
    report: dict[str, Any] = kept["report"]
    return report


def _version(distribution: str) -> str:
    return f"{distribution} {metadata.version(distribution)}"


def _digest(root: Path, words: Iterable[str]) -> str:
    found = hashlib.blake2b(json.dumps(list(words)).encode(), digest_size=16)
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        found.update(hashlib.blake2b(path.read_bytes()).digest() + str(path.name).encode())
    return found.hexdigest()


def _compile(command: Path, names: Sequence[str], triton: Path | None) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "kernels"), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    first = [str(triton)] if triton else []
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, first + paths))
    done = subprocess.run(
        [sys.executable, str(command), *names],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report
