# SPDX-License-Identifier: Apache-2.0
"""How tensors become coded planes and back. `pd_connector.kv.coding` has the codecs' names, the sizes
and the format of their output; docs/codecs.md has the format byte by byte, and the measured errors.
"""

from pd_connector.codec.base import Codec
from pd_connector.codec.compiled import COMPILER
from pd_connector.codec.elements import DTYPES
from pd_connector.codec.registry import CODECS, load_codec
from pd_connector.kv.coding import Elements, Part, Shape

__all__ = ["CODECS", "COMPILER", "DTYPES", "Codec", "Elements", "Part", "Shape", "load_codec"]
