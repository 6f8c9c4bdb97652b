# SPDX-License-Identifier: Apache-2.0
"""Decides whether an address in `kv_transfer_params` may be dialled.

Clients can put any address there. So a producer seals its own address with the shared key. A consumer dials an
address only if it is sealed, or lies within `peers` of the consumer's config.
"""

import hashlib
import hmac

import msgspec

from pd_connector.config import Config
from pd_connector.control.keys import secret
from pd_connector.errors import PDConnectorError
from pd_connector.protocol.wire.params import ProducerAddress, TransferParams
from pd_connector.protocol.wire.peers import Peer

_SEAL_BYTES = 16


class UntrustedAddressError(PDConnectorError):
    """An address is neither sealed nor within `peers`."""


def sealed(address: ProducerAddress, key: str) -> ProducerAddress:
    """The address with this engine's seal; without one if there is no key."""
    if not key or not address.peers:
        return address
    return address._replace(seal=_seal(address.engine_id, address.peers, key))


def trusted_peers(params: TransferParams, config: Config) -> tuple[Peer, ...]:
    """The ranks to fetch from, all of which may be dialled.

    Args:
        params: parameters of a request with `do_remote_prefill`.

    Raises:
        UntrustedAddressError: an address is not allowed.
    """
    address = ProducerAddress(params.remote_engine_id or "", params.peers(), params.remote_seal)
    return trusted_address(address, config)


def trusted_address(address: ProducerAddress, config: Config) -> tuple[Peer, ...]:
    """The ranks of a producer, all of which may be dialled.

    Raises:
        UntrustedAddressError: an address is not allowed.
    """
    if config.key and address.seal:
        expected = _seal(address.engine_id, address.peers, config.key)
        # As bytes: text that is not ASCII, which a client may have written, cannot be compared.
        if hmac.compare_digest(expected.encode(), address.seal.encode()):
            return address.peers
    for peer in address.peers:
        if not config.is_peer(peer.source.host):
            seal = "its seal is not ours" if address.seal else "it has no seal"
            raise UntrustedAddressError(
                f"producer at {peer.source.host!r}: {seal}, and it is not within peers "
                f"{list(config.peers)}. Give all engines one key and pass on kv_transfer_params "
                "whole, or add the network of the prefill engines to the config key peers"
            )
    return address.peers


def _seal(engine_id: str, peers: tuple[Peer, ...], key: str) -> str:
    ranks = [
        [source.host, source.port, shard.first_layer, shard.stop_layer, shard.tp_rank]
        for source, shard in peers
    ]
    first, context = peers[0].shard, []
    if first.has_cp:
        context = [first.cp_size, first.pcp_size, [shard.pcp_rank for _, shard in peers]]
    data = msgspec.msgpack.encode([engine_id, ranks, first.tp_size, *context])
    mac = hashlib.blake2b(data, digest_size=_SEAL_BYTES, key=secret(key, b"pd-seal"))
    return mac.hexdigest()
