# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: the field of requests and answers in which proxies and engines speak about a handoff.

Names and meanings are those of vLLM's NixlConnector, so that proxies written for it work unchanged. `transfer_id`,
`describe` and `remote_ranks` are optional additions.

    who                   writes                          reads
    proxy, to prefill     `prefill_params`                `parse`
    prefill, to proxy     `response`                      `parse_address`
    proxy, to decode      `decode_params`                 `parse`
    proxy, to prefill     `describe_params`               `parse`
    prefill, to proxy     `description`                   `parse_address`
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from pd_connector.kv.geometry import MAX_LAYERS, Shard
from pd_connector.protocol.wire import engine_name
from pd_connector.protocol.wire.peers import Peer, Source

FOREIGN = {"remote_bootstrap_addr": "Mooncake's", "remote_handshake_port": "MoRI-IO's"}
"""Fields that only decode requests of other connectors' protocols have, with the connector."""
MAX_RANKS = 1024
"""The most ranks of one producer: tensor-parallel size times pipeline stages."""

# JSON can spell halves of surrogate pairs, which no message can carry.
_ENCODABLE = "^[^\ud800-\udfff]*\\Z"
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=_ENCODABLE)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=_ENCODABLE)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Rank = tuple[_Host, _Port, _Count, _Count, _Count]


class TransferParams(msgspec.Struct, frozen=True):
    """The checked parameters of one request. Fields of other connectors are ignored. Null counts as a missing field."""

    do_remote_prefill: bool = False
    """The prompt's KV is at `remote_*`: fetch it."""
    do_remote_decode: bool = False
    """This prompt's KV will be fetched: keep it."""
    remote_engine_id: _Id | None = None
    remote_request_id: _Id | None = None
    """The producer's name for the KV: the transfer."""
    remote_host: _Host | None = None
    remote_port: _Port | None = None
    remote_ranks: Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    """All ranks of the producer: host, port, first and stop layer, tensor-parallel rank. If empty,
    `remote_host` and `remote_port` name the only rank."""
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    """Tensor-parallel size of the producer."""
    cp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    """Ranks of the producer that share the tokens of a sequence."""
    pcp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    """Ranks of the producer with the same tensor-parallel rank, in one stage."""
    remote_pcp_ranks: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    """For each of `remote_ranks`, its place among the `pcp_size` ranks; empty: 0."""
    remote_block_ids: Any = None
    """Null if the prefill may not have finished. Any other value is not used."""
    remote_num_tokens: _Count | None = None
    """Tokens of the prompt that the producer has computed. The request can have one more, if a proxy appends the first token."""
    remote_seal: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[0-9a-f]*\Z")] = ""
    """The producer's proof of its address (`control.seal`)."""
    transfer_id: _Id | None = None
    """A name for the KV that the proxy has chosen, so that it can send both requests at once."""
    describe: bool = False
    """Keep no KV: only answer with this producer's address."""
    consumes: bool = True
    """In an answer to `describe`: whether the engine can also fetch KV."""
    from_first_token: bool = False
    """The decode engine goes on from the token that the prefill engine chooses (SGLang). A prefill engine whose model keeps
    recurrent states computes the whole prompt then; otherwise it leaves the last token to the decode engine."""
    keeps_states: bool = False
    """In an answer to `describe`, of an engine that computes every prompt whole (SGLang): its model keeps recurrent states,
    so a decode engine that computes the last token (vLLM) needs a prefill of the prompt without it."""
    left_tokens: _Count | None = None
    """Tokens at the end of each prompt that the producer leaves to the decode engine (vLLM: models with states, several MTP
    modules). Without it a decode engine counts as many as it would leave itself."""

    def peers(self) -> tuple[Peer, ...]:
        """The producer's ranks. Needs `remote_host` and `remote_port`."""
        assert self.remote_host is not None
        assert self.remote_port is not None
        engine_id = self.remote_engine_id or ""
        if not self.remote_ranks:
            source = Source(self.remote_host, self.remote_port, engine_id)
            return (Peer(source, Shard(0, MAX_LAYERS, 0, 1)),)
        pcp_ranks = self.remote_pcp_ranks or (0,) * len(self.remote_ranks)
        sizes = self.tp_size, self.cp_size
        return tuple(
            Peer(
                Source(host, port, engine_id),
                Shard(first, stop, rank, *sizes, pcp_rank, self.pcp_size),
            )
            for (host, port, first, stop, rank), pcp_rank in zip(
                self.remote_ranks, pcp_ranks, strict=True
            )
        )

    @property
    def wait(self) -> bool:
        return self.remote_block_ids is None


class ProducerAddress(NamedTuple):
    """A producer's address, in its answer to `describe` and in every response."""

    engine_id: str
    peers: tuple[Peer, ...] = ()  # all ranks; `remote_host` is that of the first
    seal: str = ""  # the producer's proof of this address
    data_ports: tuple[int, ...] = ()  # of its ranks, for firewall rules
    consumes: bool = True  # whether the engine can also fetch KV
    keeps_states: bool = False  # see `TransferParams`, and so is the next
    left_tokens: int | None = None

    @property
    def host(self) -> str:
        return self.peers[0].source.host

    @property
    def port(self) -> int:
        return self.peers[0].source.port

    def same_place(self, other: "ProducerAddress") -> bool:
        """Whether host, port and engine are the same. Other fields can differ: only an answer to `describe` has all
        fields."""
        return self[:3] == other[:3]

    def fields(self) -> dict[str, Any]:
        """The address as fields of `kv_transfer_params`."""
        return {
            "remote_engine_id": self.engine_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_ranks": [
                [source.host, source.port, shard.first_layer, shard.stop_layer, shard.tp_rank]
                for source, shard in self.peers
            ],
            "tp_size": self.peers[0].shard.tp_size,
            **self._context(),
            **({"remote_seal": self.seal} if self.seal else {}),
            **({"keeps_states": True} if self.keeps_states else {}),
            **({} if self.left_tokens is None else {"left_tokens": self.left_tokens}),
        }

    def _context(self) -> dict[str, Any]:
        """The fields of context parallelism; none without it."""
        shards = [shard for _, shard in self.peers]
        if not shards[0].has_cp:
            return {}
        pcp = {
            "pcp_size": shards[0].pcp_size,
            "remote_pcp_ranks": [shard.pcp_rank for shard in shards],
        }
        return {"cp_size": shards[0].cp_size, **(pcp if shards[0].pcp_size > 1 else {})}


def parse(params: Mapping[str, Any] | None) -> TransferParams | None:
    """Read a request's `kv_transfer_params`; None if they ask for no handoff.

    Raises:
        ValueError: they are wrong; the message names the field.
    """
    if not params:
        return None
    try:
        parsed = _read(params)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("$.", "")) from None
    if parsed.do_remote_prefill and parsed.do_remote_decode:
        raise ValueError("do_remote_prefill and do_remote_decode are both true: must be one")
    if parsed.do_remote_prefill:
        for field, whose in FOREIGN.items():
            if params.get(field) is not None and not parsed.remote_ranks:
                raise ValueError(
                    f"{field}: the proxy speaks {whose} protocol; PDConnector speaks NixlConnector's: set the proxy to that "
                    "(llm-d's routing sidecar: --kv-connector=nixlv2)"
                )
        # A proxy that sends both requests at once has given the prefill engine this name.
        if parsed.transfer_id:
            parsed = msgspec.structs.replace(parsed, remote_request_id=parsed.transfer_id)
        for name in ("remote_request_id", "remote_host", "remote_port"):
            if getattr(parsed, name) is None:
                raise ValueError(f"do_remote_prefill without {name}: required to fetch KV")
    return parsed if parsed.do_remote_prefill or parsed.do_remote_decode else None


def parse_address(params: object) -> ProducerAddress | None:
    """The address in the `kv_transfer_params` of a prefill engine's answer.

    Args:
        params: that field of the answer as JSON gave it, of any type.

    Returns:
        None if they name no engine, host or port, or a field has a wrong type: another connector, or none, has
        answered.
    """
    try:
        parsed = _read(params)
    except (msgspec.ValidationError, ValueError):
        return None
    if not (parsed.remote_engine_id and parsed.remote_host and parsed.remote_port):
        return None
    return ProducerAddress(
        parsed.remote_engine_id,
        parsed.peers(),
        parsed.remote_seal,
        consumes=parsed.consumes,
        keeps_states=parsed.keeps_states,
        left_tokens=parsed.left_tokens,
    )


def prefill_params(
    transfer: str | None = None, *, from_first_token: bool = False
) -> dict[str, Any]:
    """Parameters of a prefill request whose KV will be fetched.

    Args:
        transfer: a name for the KV, at most 256 characters, so that the decode request can be sent at the same time.
            Without it the engine chooses a name, and its answer has it.
        from_first_token: see `TransferParams`.
    """
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    if from_first_token:
        params["from_first_token"] = True
    return params if transfer is None else {**params, "transfer_id": transfer}


def decode_params(address: ProducerAddress, transfer: str) -> dict[str, Any]:
    """Parameters of a decode request whose KV comes from the prefill engine at `address`.

    Args:
        address: address of the prefill engine.
        transfer: the name of the KV in `prefill_params` of the prefill request.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": transfer,
        "remote_block_ids": None,  # the prefill may not have begun: open the transfer and wait
        **address.fields(),
    }


def describe_params() -> dict[str, Any]:
    """Parameters of a request that a prefill engine answers with its address. It keeps no KV for it."""
    return {**prefill_params(), "describe": True}


def response(
    address: ProducerAddress,
    *,
    transfer: str,
    pages: Sequence[Sequence[int]],
    tokens: int,
    push: bool = False,
) -> dict[str, Any]:
    """The parameters in a prefill's answer. A proxy puts them into the decode request unchanged.

    Args:
        address: address of this engine.
        transfer: the name of the KV.
        pages: page ids by page table.
        tokens: number of tokens of the prompt. push: the proxy can send both requests of the next prompt at once. Only
            a proxy that names the KV itself can do
            that. vllm-router does not name it, and drops our name if it sees `push`.
    """
    fields = address.fields()
    ranks = tuple(tuple(rank) for rank in fields["remote_ranks"])
    sizes = fields.get("cp_size", 1), fields.get("pcp_size", 1)
    context = engine_name.Context(*sizes, tuple(fields.get("remote_pcp_ranks", ())))
    named = engine_name.NamedEngine(address.engine_id, ranks, address.seal, context)
    return {
        **decode_params(address, transfer),
        "remote_engine_id": engine_name.write(named),
        **({"transfer_mode": "push"} if push else {}),
        "remote_block_ids": [list(table) for table in pages],
        "remote_num_tokens": tokens,
        "pp_size": _stages(address),
    }


def description(address: ProducerAddress, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The answer to `describe_params`. A decode engine has no address: its answer is `about` alone."""
    if not (address.peers and address.port):
        return {**(about or {})}
    ports = {"data_ports": sorted(address.data_ports)} if address.data_ports else {}
    more = {"consumes": address.consumes, "pp_size": _stages(address), **ports}
    return {"describe": True, **address.fields(), **more, **(about or {})}


def _read(params: object) -> TransferParams:
    """Raises msgspec.ValidationError or ValueError. Null is a missing field: proxies in typed languages write it."""
    if isinstance(params, Mapping):
        params = {name: value for name, value in params.items() if value is not None}
        if isinstance(name := params.get("remote_engine_id"), str):
            engine = engine_name.read(name)
            params["remote_engine_id"] = engine.engine_id
            if engine.ranks and "remote_ranks" not in params:
                params |= {"remote_ranks": engine.ranks, "remote_seal": engine.seal}
                params |= engine.context._asdict()
    parsed = msgspec.convert(params, TransferParams)
    if parsed.remote_pcp_ranks and len(parsed.remote_pcp_ranks) != len(parsed.remote_ranks):
        counts = f"{len(parsed.remote_pcp_ranks)} places for {len(parsed.remote_ranks)} ranks"
        raise ValueError(f"remote_pcp_ranks: {counts}: must be as many")
    return parsed


def _stages(address: ProducerAddress) -> int:
    """Pipeline stages of a producer."""
    return len({peer.shard.first_layer for peer in address.peers})
