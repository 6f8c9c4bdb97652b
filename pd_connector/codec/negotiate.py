# SPDX-License-Identifier: Apache-2.0
"""Which codec a pair uses."""

from collections.abc import Sequence

from pd_connector.codec.base import Codec
from pd_connector.codec.elements import Elements
from pd_connector.codec.fp8 import Fp8E4M3
from pd_connector.codec.int8 import Int8
from pd_connector.codec.raw import Raw

RAW = Raw()
FP8_E4M3 = Fp8E4M3()
INT8 = Int8()

# Fewest bytes of scales first, raw last.
CODECS: dict[str, Codec] = {codec.name: codec for codec in (FP8_E4M3, INT8, RAW)}


def permitted(setting: str, max_error: float) -> tuple[str, ...]:
    """The names of the codecs that a side's configuration permits, fastest over a link first.

    Args:
        setting: `auto`, or a codec's name, which permits that codec whatever its error.
        max_error: for `auto`, the largest relative L2 error of the attention output.

    Raises:
        ValueError: no codec has this name.
    """
    if setting == "auto":
        return tuple(name for name, codec in CODECS.items() if codec.error_bound <= max_error)
    if setting not in CODECS:
        raise ValueError(
            f"codec {setting!r}: must be auto or one of {', '.join(CODECS)} (config key codec)"
        )
    return tuple(dict.fromkeys((setting, RAW.name)))


def negotiate(
    mine: Sequence[str], theirs: Sequence[str], source: Elements, destination: Elements
) -> Codec:
    """The codec of fewest bytes an element that both sides permit; of equal ones the more accurate.

    Scales, at most 3 percent of a long block, are not counted: they must not make the less accurate
    codec win. An FP8 source is sent raw, which is one byte an element already. To an FP8 destination
    a float source sends that cache's own codes: it would store the same bits from `raw`, so this
    needs no permission.

    Args:
        mine: names from `permitted`.
        theirs: the other side's; names this version does not know are passed over.
        source: how the producer's cache stores elements.
        destination: how the consumer's cache stores them.

    Raises:
        ValueError: a dtype that no codec knows, or a scale that cannot be one.
    """
    if source.checked().is_fp8:
        return RAW
    if destination.checked().is_fp8:
        return FP8_E4M3
    both = [codec for name, codec in CODECS.items() if name in mine and name in theirs]
    one_byte = [codec for codec in both if codec is not RAW]
    return min(one_byte, key=lambda codec: codec.error_bound, default=RAW)
