# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: what a proxy puts into a request, and what it gets back.

Names and meanings are those of vLLM's NixlConnector, so that proxies written for it work
unchanged. `transfer_id` and `describe` are additions; both are optional.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class TransferParams(msgspec.Struct, frozen=True):
    """The parameters of one request, checked. Fields of other connectors are ignored."""

    do_remote_prefill: bool = False
    """The prompt's KV is at `remote_*`: fetch it."""
    do_remote_decode: bool = False
    """Someone will fetch this prompt's KV: keep it."""
    remote_engine_id: _Id | None = None
    remote_request_id: _Id | None = None
    """The producer's name for the KV: the transfer."""
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    remote_block_ids: Any = None
    """Null where the prefill may not have finished; its value is not used otherwise."""
    transfer_id: _Id | None = None
    """A name for the KV that the proxy chose, so that it can tell both sides at once."""
    describe: bool = False
    """Keep nothing; only tell this producer's address."""

    @property
    def wait(self) -> bool:
        return self.remote_block_ids is None


def parse(params: Mapping[str, Any] | None) -> TransferParams | None:
    """Read a request's `kv_transfer_params`; None where it asks for nothing.

    Raises:
        ValueError: they cannot be followed; the message names the field.
    """
    if not params:
        return None
    try:
        parsed = msgspec.convert(dict(params), TransferParams)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("$.", "")) from None
    if parsed.do_remote_prefill and parsed.do_remote_decode:
        raise ValueError("do_remote_prefill and do_remote_decode are both true: must be one")
    if parsed.do_remote_prefill:
        for name in ("remote_request_id", "remote_host", "remote_port"):
            if getattr(parsed, name) is None:
                raise ValueError(f"do_remote_prefill without {name}: required to fetch KV")
    return parsed if parsed.do_remote_prefill or parsed.do_remote_decode else None


def response(
    *, engine_id: str, host: str, port: int, transfer: str, pages: Sequence[int], tokens: int
) -> dict[str, Any]:
    """What a prefill answers; a proxy puts it into the decode request as it is."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": transfer,
        "remote_host": host,
        "remote_port": port,
        "remote_block_ids": [list(pages)],
        "remote_num_tokens": tokens,
        "tp_size": 1,
        "pp_size": 1,
    }


def description(*, engine_id: str, host: str, port: int) -> dict[str, Any]:
    """The answer to `describe`."""
    return {
        "describe": True,
        "remote_engine_id": engine_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "pp_size": 1,
    }
