# SPDX-License-Identifier: Apache-2.0
"""Folders of a run, and the environment with which its steps find this clone."""

import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_run.parts import TRITON_CACHE

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""

STATE = ROOT / "build" / "gpu"
"""Folder of the results so far, from which a second call continues. Git ignores it."""

CARRIED = ROOT / "build" / "carry"
"""Folder in which `ci/offline_bundle` writes, and from which `ci/gpu` unpacks. Git ignores it."""

LEAST_TEMPORARY = 1 << 30
"""Bytes that a temporary folder should have left."""

_DEFAULTS = {
    # vLLM's own default needs FlashInfer, which compiles the sampler when an engine starts (minutes, and nvcc).
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Variables of steps with engines, unless they are set."""


def environment(state: Path, sites: Sequence[Path]) -> dict[str, str]:
    """This process's environment, in which this clone is a package with its entry points.

    Args:
        state: folder of the run.
        sites: further folders with packages, such as the engine's packages. They come after ours.
    """
    site = state / "site"
    describe_project(site)
    paths = [
        ROOT,
        ROOT / "kernels",
        ROOT / "ci",
        ROOT / "ci/bench",
        site,
        *(path.resolve() for path in sites),
    ]
    before = os.environ.get("PYTHONPATH")
    told = os.pathsep.join([*map(str, paths), *([before] if before else [])])
    caches = [path.resolve() / TRITON_CACHE for path in sites if (path / TRITON_CACHE).is_dir()]
    compiled = {"TRITON_CACHE_DIR": str(caches[0])} if caches else {}
    fixed = {"PYTHONPATH": told, "PYTHONUNBUFFERED": "1", **_writable(state.resolve())}
    return {**_DEFAULTS, **compiled, **os.environ, **fixed}


def _writable(state: Path) -> dict[str, str]:
    """Folders of the run in place of a home and a temporary folder that cannot be used: compilers write in both."""
    folders = {}
    if not os.access(os.environ.get("HOME", ""), os.W_OK):
        folders["HOME"] = state / "home"
    if shutil.disk_usage(tempfile.gettempdir()).free < LEAST_TEMPORARY:
        folders["TMPDIR"] = state / "tmp"
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    return {name: str(folder) for name, folder in folders.items()}


def describe_project(site: Path) -> None:
    """Write the metadata that an installer would write: the project's name and its entry points.

    Nothing is copied and no build tool is needed; a host without a package index may have none.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups: dict[str, Mapping[str, str]] = {"console_scripts": project["scripts"]}
    groups |= project["entry-points"]
    name = project["name"]
    version = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "pd_connector" / "__init__.py").read_text(), re.M
    )[0]
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata)
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))
