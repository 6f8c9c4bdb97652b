# SPDX-License-Identifier: Apache-2.0
"""Writes an engine's address into the one field that every proxy keeps: `remote_engine_id`.

A proxy that starts prefill and decode at once has no answer of the prefill yet. llm-d's routing sidecar takes the fields of
an earlier answer for the decode request. It keeps only texts and numbers, so lists (`remote_ranks`) and fields that it does
not know (`remote_seal`) are lost. The engine's name carries them instead.
"""

import base64
import binascii
from typing import NamedTuple

import msgspec

MARK = "@pd1."
"""Stands between an engine's own id and its address."""

_Rank = tuple[str, int, int, int, int]


class Context(NamedTuple):
    """The context parallelism of an engine; the fields are those of `params.TransferParams`."""

    cp_size: int = 1
    pcp_size: int = 1
    remote_pcp_ranks: tuple[int, ...] = ()


class NamedEngine(NamedTuple):
    """The content of an engine's name.

    Attributes:
        ranks: (host, port, first layer, stop layer, tensor-parallel rank) of each rank, as in `remote_ranks`.
        seal: as in `remote_seal`.
        context: its context parallelism.
    """

    engine_id: str
    ranks: tuple[_Rank, ...] = ()
    seal: str = ""
    context: Context = Context()


class _Body(msgspec.Struct, array_like=True):
    hosts: list[str]
    ranks: list[tuple[int, int, int, int, int]]  # index of the host, and the rest
    seal: bytes


class _BodyWithContext(_Body, array_like=True):
    """The form for engines with context parallelism. Other engines' names keep the older form."""

    context: tuple[int, int, tuple[int, ...]] = Context()


def write(engine: NamedEngine) -> str:
    """The engine's name with its address."""
    hosts = list(dict.fromkeys(rank[0] for rank in engine.ranks))
    ranks = [(hosts.index(host), *rest) for host, *rest in engine.ranks]
    fields = hosts, ranks, bytes.fromhex(engine.seal)
    plain = engine.context == Context()
    body = _Body(*fields) if plain else _BodyWithContext(*fields, engine.context)  # type: ignore[arg-type]
    text = base64.urlsafe_b64encode(msgspec.msgpack.encode(body)).decode().rstrip("=")
    return f"{engine.engine_id}{MARK}{text}"


def read(name: str) -> NamedEngine:
    """The content of a name. A name without an address is the engine's id alone.

    Raises:
        ValueError: its address cannot be read.
    """
    engine_id, mark, text = name.rpartition(MARK)
    if not mark:
        return NamedEngine(name)
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        body = msgspec.msgpack.decode(packed, type=_BodyWithContext)
        ranks = tuple((body.hosts[host], *rest) for host, *rest in body.ranks if host >= 0)
    except (binascii.Error, msgspec.MsgspecError, UnicodeError, IndexError, ValueError) as error:
        raise ValueError(f"remote_engine_id: its address cannot be read ({error})") from None
    context = Context(*body.context)
    return NamedEngine(engine_id, ranks, body.seal.hex(), context)  # type: ignore[arg-type]
