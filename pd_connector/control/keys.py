# SPDX-License-Identifier: Apache-2.0
"""Keys of the control channel: CURVE from one shared secret. The keys of `tcp` are derived from them."""

import functools
import hashlib
import re
import secrets
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from pd_connector.control.addresses import readable
from pd_connector.errors import ConfigError

_MADE_HERE = re.compile("[0-9a-f]{64}")
"""Keys that `new_key` made, or that are as random."""
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class CurveKeys(NamedTuple):
    """Two key pairs, in Z85: one all listening sides share, one all dialling sides share."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def derive(cls, shared: str, channel: bytes = b"pd") -> "CurveKeys":
        """Derive both pairs from the shared secret. A peer that does not know the secret has neither of them.

        Args:
            channel: at most 9 bytes of text; the keys of one channel do not work on another.
        """
        if not zmq.has("curve"):
            raise ConfigError(
                "key is set, but this pyzmq was built without CURVE: install pyzmq's own wheel"
            )
        server = z85.encode(secret(shared, channel + b"-server"))
        client = z85.encode(secret(shared, channel + b"-client"))
        return cls(zmq.curve_public(server), server, zmq.curve_public(client), client)

    def demand(self, socket: zmq.Socket[Any]) -> None:
        """Make a socket that will bind demand the client key (see `Gatekeeper`)."""
        socket.curve_server = True
        socket.curve_secretkey = self.server_secret
        socket.setsockopt(zmq.ZAP_DOMAIN, b"pd-connector")

    def present(self, socket: zmq.Socket[Any]) -> None:
        """Make a socket that will connect prove the client key and demand the server's."""
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret
        socket.curve_serverkey = self.server_public


class Gatekeeper:
    """Tells libzmq whether a client's public key is ours (ZAP, ZeroMQ's RFC 27).

    The agent's own thread serves it: `socket` goes into its poller, and `answer` is called when the socket
    is readable.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)
        self._client = z85.decode(keys.client_public)

    def answer(self) -> None:
        """Answer every question that waits."""
        while readable(self.socket):
            sender, empty, version, request, *rest = self.socket.recv_multipart()
            is_ours = len(rest) == 5 and rest[3] == b"CURVE" and rest[4] == self._client
            status = (b"200", b"OK") if is_ours else (b"400", b"unknown key")
            self.socket.send_multipart([sender, empty, version, request, *status, b"", b""])

    def close(self) -> None:
        self.socket.close()


def new_key() -> str:
    """A fresh shared secret of 256 bits, in hexadecimal."""
    return secrets.token_hex(32)


def secret(shared: str, purpose: bytes) -> bytes:
    """32 secret bytes for one purpose (at most 16 bytes of text), derived from the shared secret.

    A key of `new_key` is strong enough as it is. Any other key can be a phrase that can be guessed, so it is stretched
    first (scrypt, RFC 7914): each guess costs 32 MiB and 0.1 s.
    """
    material = shared.encode() if _MADE_HERE.fullmatch(shared) else _stretched(shared)
    return hashlib.blake2b(material, digest_size=32, person=purpose).digest()


@functools.cache
def _stretched(shared: str) -> bytes:
    return hashlib.scrypt(
        shared.encode(),
        salt=b"pd-connector",
        n=1 << 15,
        r=8,
        p=1,
        maxmem=1 << 26,
        dklen=32,
    )
