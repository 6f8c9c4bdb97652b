# SPDX-License-Identifier: Apache-2.0
"""Packed packages that were carried to a host without a package index."""

import hashlib
import json
import platform
import tarfile
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "manifest.json"
"""Lists a folder's parts. A folder can hold some of them: parts may come with different calls."""

SITE = "site"
"""Folder beside the parts for what they contain."""

TRITON_CACHE = "triton-cache"
"""Folder in `SITE` for kernels that were compiled beforehand."""


def misfit(folder: Path) -> str:
    """Why the packages in a folder are not for this Python; empty if they are."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"{folder}: no {MANIFEST} there: give the folder that was packed"
    wanted, own = json.loads(manifest.read_text())["python"], platform.python_version_tuple()
    if wanted != ".".join(own[:2]):
        return f"{folder}: for Python {wanted}, this is {'.'.join(own)}: use that one"
    return ""


def unpacked(folders: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Check and unpack the parts in some folders. A part that was unpacked before is left alone.

    Returns:
        Folders with packages, and names of the parts that are not there. A folder is left out while it lacks a part:
        half an engine would fail in its steps. A part that the manifest calls `optional` may be missing.

    Raises:
        ValueError: a folder has no manifest or is for another Python, or a part has other bytes
            than the manifest says.
    """
    sites, missing = [], []
    for folder in folders:
        if problem := misfit(folder):
            raise ValueError(problem)
        site = folder / SITE
        site.mkdir(exist_ok=True)
        whole = True
        for part in json.loads((folder / MANIFEST).read_text())["parts"]:
            done = site / f".{part['sha256']}"
            if done.exists():
                continue
            if not (folder / part["name"]).is_file():
                missing.append(part["name"])
                whole = whole and part.get("optional", False)
                continue
            _unpack(folder / part["name"], part["sha256"], site)
            done.touch()
        if whole:
            sites.append(site)
    return sites, missing


def _unpack(part: Path, wanted: str, site: Path) -> None:
    found = hashlib.sha256(part.read_bytes()).hexdigest()
    if found != wanted:
        raise ValueError(f"{part}: sha256 {found}, must be {wanted}: carry it again")
    with tarfile.open(part, "r:xz") as tar:
        tar.extractall(site, filter="data")
    _found_here(site / TRITON_CACHE)


def _found_here(cache: Path) -> None:
    """Triton notes a kernel's files by absolute paths, and compiles again what is not there."""
    for group in cache.glob("*/__grp__*.json"):
        names = json.loads(group.read_text())["child_paths"]
        paths = {name: str(group.parent / name) for name in names if (group.parent / name).exists()}
        group.write_text(json.dumps({"child_paths": paths}))
