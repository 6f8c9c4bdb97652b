# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: what a proxy puts into a request, and what it gets back.

Names and meanings are those of vLLM's NixlConnector, so that proxies written for it work
unchanged. `transfer_id`, `describe` and `remote_ranks` are additions; all are optional.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from pd_connector.kv.geometry import MAX_LAYERS, Shard
from pd_connector.protocol.incoming import Peer, Source

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Rank = tuple[_Host, _Port, _Count, _Count, _Count]


class TransferParams(msgspec.Struct, frozen=True):
    """The parameters of one request, checked. Fields of other connectors are ignored."""

    do_remote_prefill: bool = False
    """The prompt's KV is at `remote_*`: fetch it."""
    do_remote_decode: bool = False
    """Someone will fetch this prompt's KV: keep it."""
    remote_engine_id: _Id | None = None
    remote_request_id: _Id | None = None
    """The producer's name for the KV: the transfer."""
    remote_host: _Host | None = None
    remote_port: _Port | None = None
    remote_ranks: Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=4096)] = ()
    """All ranks of the producer: host, port, first and stop layer, tensor-parallel rank. Without
    it, `remote_host` and `remote_port` name its only one."""
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    """Tensor-parallel size of the producer."""
    remote_block_ids: Any = None
    """Null where the prefill may not have finished; its value is not used otherwise."""
    transfer_id: _Id | None = None
    """A name for the KV that the proxy chose, so that it can tell both sides at once."""
    describe: bool = False
    """Keep nothing; only tell this producer's address."""

    def peers(self) -> tuple[Peer, ...]:
        """The producer's ranks. Needs `remote_host` and `remote_port`."""
        assert self.remote_host is not None
        assert self.remote_port is not None
        engine_id = self.remote_engine_id or ""
        if not self.remote_ranks:
            source = Source(self.remote_host, self.remote_port, engine_id)
            return (Peer(source, Shard(0, MAX_LAYERS, 0, 1)),)
        return tuple(
            Peer(Source(host, port, engine_id), Shard(first, stop, rank, self.tp_size))
            for host, port, first, stop, rank in self.remote_ranks
        )

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


class ProducerAddress(NamedTuple):
    """Where a producer is reached: what it answers to `describe`, and part of every response."""

    engine_id: str
    peers: tuple[Peer, ...] = ()  # all ranks; the first is the one that `remote_host` names

    def fields(self) -> dict[str, Any]:
        first = self.peers[0]
        stages = {peer.shard.first_layer for peer in self.peers}
        return {
            "remote_engine_id": self.engine_id,
            "remote_host": first.source.host,
            "remote_port": first.source.port,
            "remote_ranks": [
                [source.host, source.port, shard.first_layer, shard.stop_layer, shard.tp_rank]
                for source, shard in self.peers
            ],
            "tp_size": first.shard.tp_size,
            "pp_size": len(stages),
        }


def response(
    address: ProducerAddress, *, transfer: str, pages: Sequence[Sequence[int]], tokens: int
) -> dict[str, Any]:
    """What a prefill answers; a proxy puts it into the decode request as it is."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": transfer,
        "remote_block_ids": [list(table) for table in pages],
        "remote_num_tokens": tokens,
        **address.fields(),
    }


def description(address: ProducerAddress) -> dict[str, Any]:
    """The answer to `describe`."""
    return {"describe": True, **address.fields()}
