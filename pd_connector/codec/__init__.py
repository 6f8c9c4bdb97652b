# SPDX-License-Identifier: Apache-2.0
"""How elements are coded on the wire. The two sides agree on a codec by name when they open.

A chunk's payload is a row of coded blocks, `[layer][K|V]`. A block is one layer's K or V of a head
range and a token range, in wire order `[head][token][dim]`, coded as `[scales, zeros up to a
multiple of 16 bytes][codes]`. Sizes depend on shapes only, so both sides know every offset.
docs/codecs.md has the formats byte by byte, and the measured errors.
"""

from pd_connector.codec.base import Codec, Part, Shape
from pd_connector.codec.compiled import COMPILER
from pd_connector.codec.elements import DTYPES, Elements
from pd_connector.codec.negotiate import CODECS, negotiate, permitted

__all__ = [
    "CODECS",
    "COMPILER",
    "DTYPES",
    "Codec",
    "Elements",
    "Part",
    "Shape",
    "negotiate",
    "permitted",
]
