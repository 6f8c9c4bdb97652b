# SPDX-License-Identifier: Apache-2.0
"""Whether a test can run commands in a network namespace of its own."""

import shutil
import subprocess

import pytest


def skip_without_namespaces() -> None:
    """Skip the test where this machine has no network namespaces, or none of the programs that are used there."""
    for program, package in (("ip", "iproute2"), ("curl", "curl")):
        if not shutil.which(program):
            pytest.skip(f"no {package}")
    probe = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    if (tried := subprocess.run(probe, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no namespaces: {tried.stderr.strip()}")
