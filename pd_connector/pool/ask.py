# SPDX-License-Identifier: Apache-2.0
"""What the client of a request wants of the pool."""

from typing import Annotated

import msgspec

from pd_connector.pool.store.entry import MOST_TENANT

_MOST_PIN_S = 7 * 86400.0


class PoolAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `pool` of a request: of vLLM's `kv_transfer_params`, and of SGLang's `custom_params`."""

    read: bool = True
    """Whether chunks of the pool may be used for it."""
    write: bool = True
    """Whether its chunks are saved."""
    pin_s: Annotated[float, msgspec.Meta(ge=0, le=_MOST_PIN_S)] = 0.0
    """How long its prompt's chunks are not evicted, in seconds."""
    tenant: Annotated[str, msgspec.Meta(max_length=MOST_TENANT)] = ""
    """Whose share of the pool its chunks take. Requests without a name that the engine's config knows share one."""


def read_ask(given: object) -> PoolAsk:
    """The field's value; None stands for all defaults.

    Raises:
        ValueError: it cannot be followed.
    """
    try:
        return PoolAsk() if given is None else msgspec.convert(given, PoolAsk)
    except msgspec.ValidationError as error:
        raise ValueError(f"pool: {error}".replace("$.", "")) from None
