# SPDX-License-Identifier: Apache-2.0
"""No name that others depend on comes or goes by chance: the surface is that of `surface.txt`."""

import os
from pathlib import Path

from support.surface import lines

KEPT = Path(__file__).with_name("surface.txt")


def test_the_surface_is_the_one_that_is_kept() -> None:
    """After a change on purpose: `PD_WRITE_SURFACE=1 pytest tests/packaging/test_surface.py`, and each name that went
    is told in the changelog."""
    surface = lines()
    if os.environ.get("PD_WRITE_SURFACE"):
        KEPT.write_text("\n".join(surface) + "\n")
    kept = KEPT.read_text().splitlines()
    assert not sorted(set(kept) - set(surface)), "names that are gone"
    assert not sorted(set(surface) - set(kept)), "names that are new"
