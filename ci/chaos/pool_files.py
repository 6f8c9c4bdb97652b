# SPDX-License-Identifier: Apache-2.0
"""Damages files of a KV pool in ways that are forbidden."""

import contextlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

KINDS = ("flip", "cut", "swap", "delete")


def harm(files: Sequence[Path], kind: str, dice: random.Random) -> int:
    """Harm one of these files, or swap two. Returns how many were harmed: engines may have removed them already."""
    if len(files) < 2:
        return 0
    one, other = dice.sample(list(files), 2)
    with contextlib.suppress(OSError):
        size = one.stat().st_size
        if kind == "flip":
            with one.open("r+b") as file:
                place = dice.randrange(size or 1)
                byte = os.pread(file.fileno(), 1, place) or b"\0"
                os.pwrite(file.fileno(), bytes([byte[0] ^ (1 << dice.randrange(8))]), place)
        elif kind == "cut":
            os.truncate(one, dice.randrange(size + 1))
        elif kind == "swap":
            aside = one.with_name("aside")
            one.rename(aside)
            other.rename(one)
            aside.rename(other)
        else:
            one.unlink()
        return 1
    return 0
