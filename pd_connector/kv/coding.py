# SPDX-License-Identifier: Apache-2.0
"""How elements are stored in a cache and coded on the wire: names, sizes and error bounds, and which
codec a pair of caches uses. No tensors: `pd_connector.codec` works on these.

`payload.py` has the sizes of what is coded; docs/codecs.md has the formats byte by byte.
"""

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pd_connector.config import CODEC_GROUP, CODECS
from pd_connector.errors import ConfigError
from pd_connector.extensions import load_entry_points, unknown_name
from pd_kernels.payload import plane_bytes

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1}
"""Bytes of an element, of every dtype that codecs convert. `fp8_e4m3` is OCP's E4M3 (torch's
`float8_e4m3fn`); other kinds of FP8 have other names."""

Shape = tuple[int, int, int]  # heads, tokens, dims


class Part(enum.StrEnum):
    """Which half of a layer's cache a plane is from. An MLA latent counts as KEY."""

    KEY = "key"
    VALUE = "value"


class Elements(NamedTuple):
    """How a cache stores one part of one layer: value = stored * scale.

    Values from a peer go through `checked` first.

    Attributes:
        dtype: a key of `ELEMENT_BYTES`.
        scale: used by FP8 caches only; finite and above zero.
    """

    dtype: str
    scale: float = 1.0

    @property
    def is_fp8(self) -> bool:
        return self.dtype == "fp8_e4m3"

    @property
    def nbytes(self) -> int:
        """Bytes of one element. Raises ValueError for a dtype that no codec knows."""
        if self.dtype not in ELEMENT_BYTES:
            allowed = ", ".join(ELEMENT_BYTES)
            raise ValueError(f"cache dtype {self.dtype!r}: must be one of {allowed}")
        return ELEMENT_BYTES[self.dtype]

    def checked(self) -> "Elements":
        """Returns itself. Raises ValueError for a dtype that no codec knows, or an invalid scale."""
        if not (self.nbytes and math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"cache scale {self.scale}: must be finite and above zero")
        return self

    def same_bits(self, other: "Elements") -> bool:
        """Whether every element means the same in both, so that bits can be copied."""
        return self.dtype == other.dtype and (not self.is_fp8 or self.scale == other.scale)


class Coding(NamedTuple):
    """The facts about a codec, without its tensor work.

    Attributes:
        name: what the two sides call it.
        error_bound: relative L2 error of the attention output that it may cause, 0.0 when exact.
        element_bits: bits of a coded element, without scales; 0: as many as the source's element has.
        coded_bytes: returns the bytes of a plane on the wire, with scales and padding, from its part, its
            shape, and the elements of the producer's cache.
        codec: where the tensor work is, as `module:object`; the object is a
            `pd_connector.codec.base.Codec`.
    """

    name: str
    error_bound: float
    element_bits: int
    coded_bytes: Callable[[Part, Shape, Elements], int]
    codec: str


def _bytes_of(codec: str) -> Callable[[Part, Shape, Elements], int]:
    """`Coding.coded_bytes` of a codec of this package."""

    def coded_bytes(part: Part, shape: Shape, source: Elements) -> int:
        return plane_bytes(codec, part is Part.KEY, *shape, source.nbytes).total

    return coded_bytes


RAW = Coding("raw", 0.0, 0, _bytes_of("raw"), "pd_connector.codec.raw:RAW")
FP8_E4M3 = Coding("fp8_e4m3", 0.10, 8, _bytes_of("fp8_e4m3"), "pd_connector.codec.fp8:FP8_E4M3")
INT8 = Coding("int8", 0.02, 8, _bytes_of("int8"), "pd_connector.codec.int8:INT8")

CODINGS = {coding.name: coding for coding in (FP8_E4M3, INT8, RAW)}
"""This package's own: fewest bytes of scales first, raw last."""


def coding(name: str) -> Coding:
    """The codec of this name: one of this package, or one that another package adds.

    Raises:
        ConfigError: there is none, or its package is broken.

    >>> coding("int8").coded_bytes(Part.VALUE, (8, 512, 128), Elements("bfloat16"))
    532480
    """
    if name in CODINGS:
        return CODINGS[name]
    added = load_entry_points(CODEC_GROUP).get(name)
    if added is None:
        raise unknown_name("codec", name, CODECS, CODEC_GROUP, "codec")
    loaded = added.load()
    if not isinstance(loaded, Coding) or loaded.name != name:
        raise ConfigError(
            f"codec {name!r}, which {added.source} adds, is {loaded!r}: must be a "
            "pd_connector.kv.coding.Coding of this name"
        )
    return loaded


def permitted(setting: str, max_error: float) -> tuple[str, ...]:
    """The names of the codecs that a side's configuration permits, fastest over a link first.

    Args:
        setting: `auto`, or a codec's name, which permits that codec with any error. `auto` takes no codecs of other
            packages.
        max_error: for `auto`, the largest relative L2 error of the attention output.

    Raises:
        ConfigError: no codec has this name, or its package is broken.

    >>> permitted("auto", max_error=0.02)
    ('int8', 'raw')
    >>> permitted("fp8_e4m3", max_error=0.02)
    ('fp8_e4m3', 'raw')
    """
    if setting == "auto":
        return tuple(name for name, each in CODINGS.items() if each.error_bound <= max_error)
    return tuple(dict.fromkeys((coding(setting).name, RAW.name)))


def coarsest(names: Iterable[str]) -> str:
    """The codec with the largest error, of one or more."""
    return max(names, key=lambda name: coding(name).error_bound)


def negotiate(
    mine: Sequence[str], theirs: Sequence[str], source: Elements, destination: Elements
) -> Coding:
    """The codec with the fewest bits an element that both sides permit; if two have equally many, the more accurate
    codec.

    Scales, at most 3 percent of a long plane, are not counted: they must not make the less accurate
    codec win. An FP8 source is sent raw, which is one byte an element already. To an FP8 destination
    a float source sends that cache's own codes: it would store the same bits from `raw`, so this
    needs no permission.

    Args:
        mine: names from `permitted`.
        theirs: the other side's; names this version does not know are passed over.
        source: how the producer's cache stores elements.
        destination: how the consumer's cache stores them.

    Raises:
        ValueError: a dtype that no codec knows, or an invalid scale.

    >>> half = Elements("bfloat16")
    >>> negotiate(["int8", "raw"], ["fp8_e4m3", "int8", "raw"], half, half).name
    'int8'
    >>> negotiate(["int8", "raw"], ["raw"], half, half).name
    'raw'
    >>> negotiate(["raw"], ["raw"], half, Elements("fp8_e4m3", scale=0.5)).name
    'fp8_e4m3'
    """
    if source.checked().is_fp8:
        return RAW
    if destination.checked().is_fp8:
        return FP8_E4M3
    smaller = [c for c in _common(mine, theirs) if 0 < c.element_bits < 8 * source.nbytes]
    return min(smaller, key=lambda c: (c.element_bits, c.error_bound, c.name), default=RAW)


def _common(mine: Sequence[str], theirs: Sequence[str]) -> Iterator[Coding]:
    """Codecs that both name and this process knows."""
    for name in set(mine) & set(theirs):
        if name in CODINGS or name in load_entry_points(CODEC_GROUP):
            yield coding(name)
