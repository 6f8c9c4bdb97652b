# SPDX-License-Identifier: Apache-2.0
"""A file of the three packages is read in one go: it has 300 lines at most."""

from pathlib import Path

MOST = 300
EXCEPTIONS = {
    "kernels/pd_kernels/transfer/planes.py": "device functions that Triton inlines into every transfer kernel",
    "pd_connector/vllm/connector.py": "vLLM's interface: a list of hooks of a few lines each",
    "pd_connector/vllm/pool.py": "one hook of vLLM's scheduler after the other",
    "scheduler_plugins/sim/cluster.py": "one simulated clock drives routers, engines and transfers",
}
"""Longer files, and why they stay whole."""
MOST_OF_EXCEPTIONS = 330


def lengths(root: Path) -> dict[str, int]:
    return {
        str(file.relative_to(root)): len(file.read_text().splitlines())
        for package in ("pd_connector", "scheduler_plugins", "kernels/pd_kernels")
        for file in (root / package).rglob("*.py")
    }


def test_no_file_is_longer_than_300_lines(root: Path) -> None:
    found = lengths(root)
    assert len(found) > 500
    assert not {
        file: f"{lines} lines: take its second noun out"
        for file, lines in found.items()
        if lines > (MOST_OF_EXCEPTIONS if file in EXCEPTIONS else MOST)
    }


def test_every_exception_is_a_file_that_needs_it(root: Path) -> None:
    found = lengths(root)
    assert not [file for file in EXCEPTIONS if found.get(file, 0) <= MOST]
