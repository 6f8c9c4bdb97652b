# SPDX-License-Identifier: Apache-2.0
"""Link packages of one virtual environment into another: those that both want in the same version.

    .venv/bin/python ci/link_packages.py CONSTRAINTS .venv-sglang/bin/python

Two engines need two environments, but most of what they need is the same. A hard link costs neither
time nor disk. pip finds a linked package installed, and removing it in one environment leaves the
other's alone. Scripts (bin/) are not linked: they name their own environment's Python.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path


def main() -> None:
    constraints, python = sys.argv[1:]
    asked = "import sysconfig; print(sysconfig.get_path('platlib'))"
    target = Path(subprocess.check_output([python, "-c", asked], text=True).strip())
    source = Path(sysconfig.get_path("platlib"))
    wanted = pins(Path(constraints).read_text())
    linked = 0
    for package in distributions(path=[str(source)]):
        name = canonical(package.metadata["Name"])
        if wanted.get(name) == package.version.split("+")[0]:
            linked += link(package, source, target)
    print(f"{linked} packages linked from {source}")


def pins(text: str) -> dict[str, str]:
    """Version by name, from the lines `name==version`."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s+#]+)", text, re.MULTILINE)
    return {canonical(name): version for name, version in found}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def link(package: Distribution, source: Path, target: Path) -> bool:
    """Link every file of a package that lies in `source`; returns whether it was not there yet."""
    files = [file for file in package.files or () if ".." not in file.parts]
    record = next((file for file in files if file.name == "RECORD"), None)
    if record is None or (target / record).exists():
        return False
    for file in sorted(files, key=lambda file: file == record):  # the record last: then it is whole
        place = target / file
        if place.exists() or not (source / file).exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / file, place)
        except OSError:  # a file system without hard links
            shutil.copy2(source / file, place)
    return True


if __name__ == "__main__":
    main()
