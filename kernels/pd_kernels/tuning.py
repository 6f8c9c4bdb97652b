# SPDX-License-Identifier: Apache-2.0
"""Which variant of a kernel is launched, where two are kept until a GPU has decided between them.

Each field is an A/B switch. `python -m pd_kernels.bench` times both settings in one run.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

VARIABLE = "PD_KERNELS_TUNING"
"""Environment variable that changes settings in a process and those it starts, an engine's."""


@dataclass(frozen=True)
class Tuning:
    """Settings of all kernels.

    Attributes:
        pairing: where a KV head has more than 64 lines, the blocks of lines run at the same time in
            neighbouring programs and read the same tiles, so that memory is read once. Off: the
            blocks are rows of their own, one after another, and each reads KV from memory.
        column_merge: a part of a split-KV merge is some columns of a line, so that more workers
            share the merge of a row with few lines. Off: whole lines.
        small_tiles: `mla_decode` with FP8 latents or more than 64 lines reads tiles of 32 tokens in
            six or eight stages, so that loads are under way during the products. Off: tiles of 64 tokens in
            three stages, where each turn of the loop waits for the loads that it has just begun.
        latent_codes: `mla_decode` with FP8 latents and up to 32 lines multiplies codes as float16,
            in rows of 16 or 32 lines. Off: codes are decoded to bfloat16 and written to shared
            memory once more, rows are padded to 64 lines, and each product is waited for.
        half_codes: `paged_decode` multiplies FP8 codes as float16, one instruction for two codes.
            Off: as bfloat16, which takes two conversions more for each pair.
        gluon: `mla_decode` with latents of 16 bits in pages of 64 tokens takes the Gluon kernel
            (`mla_gluon_kernel.py`), on Hopper only. Off, until it has run on a GPU: the Triton
            kernel.
        packed_codes: gathers with a codec keep elements of 16 bits as words of two, whose
            magnitudes are compared, and which are coded, two at a time. Off: element by element.
        direct_launch: a call with a plan whose shapes, strides, dtypes and alignments an earlier
            call had is launched as that one was (`direct.py`). Off, until it has run on a GPU:
            checked, prepared and searched for by Triton each time.
        mixed_steps: in vLLM, steps with prefill chunks and decodes take `mixed_attention`, in one
            launch a layer. Off, until it has run on a GPU: `paged_decode`, then the stock backend.
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
        """All settings as bits of a number, which is compared sooner than they are."""
        values = (getattr(self, each.name) for each in fields(self))
        return sum(on << place for place, on in enumerate(values))

    @classmethod
    def of(cls, told: str) -> "Tuning":
        """The settings with those changed that `told` names.

        Args:
            told: as in the environment variable PD_KERNELS_TUNING: fields with 0 or 1, with commas
                between them.

        Raises:
            ValueError: a field that there is not, or another value.

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
    """Change settings for a while, in all threads. A plan must be used under the settings that it
    was made under.

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
