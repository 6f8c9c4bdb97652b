# SPDX-License-Identifier: Apache-2.0
"""How much the KV of one prompt can differ between two engines because of rounding alone."""

from typing import NamedTuple

from pd_connector.kv.coding import coding


class Tolerance(NamedTuple):
    """Largest relative distance of K, or V, of one layer: the norm of the difference divided by the norm.

    Attributes:
        page: for one page. A page with other content has a distance of about 1.
        layer: for all compared tokens. It finds small errors in every page.
        token: for one token. A token is noisier than a page, but shows errors that a page's other tokens would hide,
            such as an error at the edge of a chunk. A token with other content has a distance of about 1.
    """

    page: float
    layer: float
    token: float


_EXACT = Tolerance(page=0.1, layer=0.05, token=0.3)
"""float32: kernels may multiply in TF32."""
_HALF = Tolerance(page=0.3, layer=0.15, token=0.5)
"""Elements of 16 bits and fewer. Rounding adds up from layer to layer, and may send single tokens to other
experts."""
_FP8_ERROR = 0.1
"""What a cache of FP8 adds: attention reads what was rounded."""


def tolerance(source: str, destination: str, codec: str) -> Tolerance:
    """Largest distance that rounding can explain. docs/trust.md has measured distances; all are far smaller.

    Args:
        source: dtype of the producer's cache.
        destination: dtype of the consumer's.
        codec: the codec of the KV on the wire.

    >>> tolerance("bfloat16", "bfloat16", "raw")
    Tolerance(page=0.3, layer=0.15, token=0.5)
    >>> tolerance("float32", "float32", "int8")
    Tolerance(page=0.12000000000000001, layer=0.07, token=0.32)
    """
    dtypes = source, destination
    base = _EXACT if dtypes == ("float32", "float32") else _HALF
    lossy = max(coding(codec).error_bound, _FP8_ERROR if "fp8_e4m3" in dtypes else 0.0)
    return Tolerance(*(allowed + lossy for allowed in base))
