# SPDX-License-Identifier: Apache-2.0
"""Which variant of a kernel is launched, where two are kept until a GPU has decided between them.

Each field is an A/B switch. `python -m pd_kernels.bench decode` times both settings in one run.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tuning:
    """Settings of all decode kernels.

    Attributes:
        pairing: where a KV head has more than 64 lines, the blocks of lines run at the same time in
            neighbouring programs and read the same tiles, so that memory is read once. Off: the
            blocks are rows of their own, one after another, and each reads KV from memory.
        column_merge: a part of a split-KV merge is some columns of a line, so that more workers
            share the merge of a row with few lines. Off: whole lines.
        small_tiles: `mla_decode` with FP8 latents or more than 64 lines reads tiles of 32 tokens in
            six or eight stages, so that loads are under way during the products. Off: tiles of 64 tokens in
            three stages, where each turn of the loop waits for the loads that it has just begun.
        half_codes: `paged_decode` multiplies FP8 codes as float16, one instruction for two codes.
            Off: as bfloat16, which takes two conversions more for each pair.
    """

    pairing: bool = True
    column_merge: bool = True
    small_tiles: bool = True
    half_codes: bool = True


_settings = [Tuning()]
"""The last one counts."""


def tuning() -> Tuning:
    """The settings that calls and plans made now will use."""
    return _settings[-1]


@contextlib.contextmanager
def tuned(**settings: bool) -> Iterator[None]:
    """Change settings for a while, in all threads. A plan must be used under the settings that it
    was made under.

    Args:
        settings: fields of `Tuning`.

    Example:
        >>> from pd_kernels.attention.tuning import tuned, tuning
        >>> with tuned(pairing=False):
        ...     tuning().pairing
        False
    """
    _settings.append(replace(tuning(), **settings))
    try:
        yield
    finally:
        _settings.pop()
