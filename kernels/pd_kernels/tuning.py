# SPDX-License-Identifier: Apache-2.0
"""Switches between two variants of a kernel. Both stay until a benchmark on a GPU has decided.

Each field is an A/B switch. `python -m pd_bench.kernels` times both settings in one run.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

VARIABLE = "PD_KERNELS_TUNING"
"""Environment variable that changes settings in a process and in the processes that it starts."""


@dataclass(frozen=True)
class Tuning:
    """Settings of all kernels. Each names the measurement that will decide it.

    Attributes:
        column_merge: a part of a split-KV merge is some columns of a line. More workers then share
            the merge of a row with few lines. Off: a part is whole lines. Decided by the rows
            `column_merge: on / off` of `bench decode`, for one sequence of 64k (since 2026-11-23).
        gluon: `mla_decode` with latents of 16 bits in pages of 64 tokens and more than 32 lines
            takes the Gluon kernel (`mla_gluon_kernel.py`), on Hopper only. Off: the Triton kernel.
            Decided by the rows `gluon: on / off` of `bench decode`, steps `mla-check` and `mla` of
            `ci/gpu` (on since 2026-11-27).
        swapped: `paged_decode` of FP8 caches with few lines multiplies with tokens as the lines of
            products, on Hopper only. Off: queries are the lines, padded to 16. Decided by the rows
            `swapped: on / off` of `bench decode` (since 2026-11-27).
        direct_launch: if an earlier call with the same plan had the same shapes, strides, dtypes
            and alignments, its launch is used again (`direct.py`). Off: each call is checked and
            prepared, and Triton searches for its kernel. Decided by the rows `direct_launch: on /
            off` of `bench decode`, which also compare results (since 2026-11-26).
        mixed_steps: in vLLM, steps with prefill chunks and decodes take `mixed_attention`, in one
            launch a layer. Off: `paged_decode`, then the stock backend. Decided by the rows
            `mixed_attention` of `bench decode`, against two launches in turn (since 2026-11-23).
    """

    column_merge: bool = True
    gluon: bool = True
    swapped: bool = True
    direct_launch: bool = True
    mixed_steps: bool = False

    @functools.cached_property
    def code(self) -> int:
        """All settings as bits of one number, which is faster to compare."""
        values = (getattr(self, each.name) for each in fields(self))
        return sum(on << place for place, on in enumerate(values))

    @classmethod
    def of(cls, text: str) -> "Tuning":
        """The settings with the changes that `text` names.

        Args:
            text: fields with 0 or 1, separated by commas, as in the environment variable
                PD_KERNELS_TUNING.

        Raises:
            ValueError: an unknown field, or a value that is not 0 or 1.

        Example:
            >>> from pd_kernels.tuning import Tuning
            >>> Tuning.of("gluon=0,direct_launch=0").direct_launch
            False
        """
        names = {field.name for field in fields(cls)}
        changed = {}
        for part in filter(None, (each.strip() for each in text.split(","))):
            name, _, value = part.partition("=")
            if name not in names or value not in ("0", "1"):
                raise ValueError(
                    f"{VARIABLE}: {part!r}: must be one of {', '.join(sorted(names))}, and =0 or =1"
                )
            changed[name] = value == "1"
        return cls(**changed)


_settings = [Tuning.of(os.environ.get(VARIABLE, ""))]
"""The last one counts."""


def tuning() -> Tuning:
    """The settings that calls and plans made now will use."""
    return _settings[-1]


@contextlib.contextmanager
def tuned(**settings: bool) -> Iterator[None]:
    """Change settings for a while, in all threads. Use a plan under the settings under which it was
    made.

    Args:
        settings: fields of `Tuning`.

    Example:
        >>> from pd_kernels.tuning import tuned, tuning
        >>> with tuned(column_merge=False):
        ...     tuning().column_merge
        False
    """
    _settings.append(replace(tuning(), **settings))
    try:
        yield
    finally:
        _settings.pop()
