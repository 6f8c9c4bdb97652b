# SPDX-License-Identifier: Apache-2.0
"""Switches between two variants of a kernel. Both stay until a benchmark on a GPU has decided.

Each field is an A/B switch. `python -m pd_kernels.bench` times both settings in one run.
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
    """Settings of all kernels.

    Attributes:
        pairing: if a KV head has more than 64 lines, its blocks of lines run at the same time in
            neighbouring programs. They read the same tiles, so memory is read once. Off: each block
            is a row of its own. The blocks run one after another, and each reads KV from memory.
        column_merge: a part of a split-KV merge is some columns of a line. More workers then share
            the merge of a row with few lines. Off: a part is whole lines.
        small_tiles: `mla_decode` with FP8 latents or more than 64 lines reads tiles of 32 tokens in
            six or eight stages, so that loads are under way during the products. Off: tiles of 64 tokens in
            three stages, where each turn of the loop waits for the loads that it has just begun.
        latent_codes: `mla_decode` with FP8 latents and up to 32 lines multiplies codes as float16,
            in rows of 16 or 32 lines. Off: codes are decoded to bfloat16 and written to shared
            memory again. Rows are padded to 64 lines, and the kernel waits for each product.
        half_codes: `paged_decode` multiplies FP8 codes as float16, one instruction for two codes.
            Off: as bfloat16, which needs two more conversions per pair.
        gluon: `mla_decode` with latents of 16 bits in pages of 64 tokens takes the Gluon kernel
            (`mla_gluon_kernel.py`), on Hopper only. Off: the Triton kernel. The default is off
            until the Gluon kernel has run on a GPU.
        packed_codes: gathers with a codec keep two elements of 16 bits in one word. Magnitudes are
            compared, and elements are coded, two at a time. Off: element by element.
        direct_launch: if an earlier call with the same plan had the same shapes, strides, dtypes
            and alignments, its launch is used again (`direct.py`). Off: each call is checked and
            prepared, and Triton searches for its kernel. The default is off until this has run on a
            GPU.
        mixed_steps: in vLLM, steps with prefill chunks and decodes take `mixed_attention`, in one
            launch a layer. Off: `paged_decode`, then the stock backend. The default is off until
            this has run on a GPU.
    """

    pairing: bool = True
    column_merge: bool = True
    small_tiles: bool = True
    latent_codes: bool = True
    half_codes: bool = True
    gluon: bool = False
    packed_codes: bool = True
    direct_launch: bool = False
    mixed_steps: bool = False

    @functools.cached_property
    def code(self) -> int:
        """All settings as bits of one number, which is faster to compare."""
        values = (getattr(self, each.name) for each in fields(self))
        return sum(on << place for place, on in enumerate(values))

    @classmethod
    def of(cls, told: str) -> "Tuning":
        """The settings with the changes that `told` names.

        Args:
            told: fields with 0 or 1, separated by commas, as in the environment variable
                PD_KERNELS_TUNING.

        Raises:
            ValueError: an unknown field, or a value that is not 0 or 1.

        Example:
            >>> from pd_kernels.tuning import Tuning
            >>> Tuning.of("gluon=1,pairing=0").pairing
            False
        """
        known = {field.name for field in fields(cls)}
        changed = {}
        for part in filter(None, (each.strip() for each in told.split(","))):
            name, _, value = part.partition("=")
            if name not in known or value not in ("0", "1"):
                raise ValueError(
                    f"{VARIABLE}: {part!r}: must be one of {', '.join(sorted(known))}, and =0 or =1"
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
        >>> with tuned(pairing=False):
        ...     tuning().pairing
        False
    """
    _settings.append(replace(tuning(), **settings))
    try:
        yield
    finally:
        _settings.pop()
