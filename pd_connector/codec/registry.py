# SPDX-License-Identifier: Apache-2.0
"""The codecs by name, from this package and from other installed packages."""

import functools
import pkgutil
from typing import cast

from pd_connector.codec.base import Codec
from pd_connector.errors import ConfigError
from pd_connector.kv.coding import CODINGS, coding


@functools.cache
def load_codec(name: str) -> Codec:
    """The codec of this name; imported at the first call.

    Raises:
        ConfigError: no codec has this name, or it cannot be imported.

    >>> import torch
    >>> from pd_connector.kv.coding import Elements, Part
    >>> codec, half = load_codec("int8"), Elements("bfloat16")
    >>> plane = torch.tensor([[[1.0, -2.0], [0.5, 4.0]]], dtype=torch.bfloat16)
    >>> nbytes = codec.coding.coded_bytes(Part.VALUE, (1, 2, 2), half)
    >>> coded = torch.empty(nbytes, dtype=torch.uint8)
    >>> codec.encode(Part.VALUE, plane, half, half, coded)
    >>> codec.decode(Part.VALUE, coded, (1, 2, 2), half, half)
    tensor([[[ 1.0000, -2.0000],
             [ 0.5078,  4.0000]]], dtype=torch.bfloat16)
    """
    entry = coding(name)
    try:
        return cast(Codec, pkgutil.resolve_name(entry.codec))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"codec {name!r} is at {entry.codec}, which cannot be loaded: {error!r}. Repair or "
            "uninstall the package that adds it (config key codec)"
        ) from error


CODECS = {name: load_codec(name) for name in CODINGS}
"""The codecs of this package."""
