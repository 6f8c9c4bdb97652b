# SPDX-License-Identifier: Apache-2.0
"""A wheel built from a copy of the repository, and an environment that has it."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
_FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
# With tests beside the packages, as in a clone: they must stay out.
_FOLDERS = ("pd_connector", "scheduler_plugins", "kernels", "tests", "docs", "examples")


def copy_source(folder: Path) -> Path:
    """Copy the repository to `folder/source`."""
    source = folder / "source"
    source.mkdir()
    for file in _FILES:
        shutil.copy(ROOT / file, source)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=unwanted)
    return source


def build(source: Path) -> Path:
    """The wheel `pip install .` would install. Built with the setuptools that is here: no network."""
    folder = source.parent
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source])
    (built,) = folder.glob("*.whl")
    return built


def installed(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel, and with all other packages of this one (vLLM, aiohttp). Returns its folder of
    commands. Nothing of the clone is in it."""
    venv.create(folder, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    run([*PIP, "--python", folder / "bin" / "python", "install", "--no-deps", wheel])
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    code = (
        f"import pd_connector as it; assert it.__file__.startswith({str(packages)!r}), it.__file__"
    )
    run([folder / "bin" / "python", "-I", "-c", code])
    return folder / "bin"


def run(command: list[object]) -> None:
    ended = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
