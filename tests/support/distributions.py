# SPDX-License-Identifier: Apache-2.0
"""Toy packages, installed as far as Python's metadata is concerned: a folder for `sys.path`."""

from collections.abc import Mapping
from pathlib import Path


def add_distribution(
    folder: Path,
    name: str,
    modules: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
) -> None:
    """Write a package into a folder.

    Args:
        folder: made if it is not there.
        modules: source text by module name.
        entry_points: by group and name, what stands behind them (`module:object`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = (
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in points.items())])
        for group, points in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n\n".join(sections) + "\n")
