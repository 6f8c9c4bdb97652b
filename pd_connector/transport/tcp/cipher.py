# SPDX-License-Identifier: Apache-2.0
"""Keys of one connection, and how they seal its records.

All keys are derived (HKDF, RFC 5869) from the secrets of both transports and, if there is one, the engines' shared
key. The secrets pass over the encrypted control channel only. Both sides add a fresh nonce to each connection. So no
two connections have a key in common, and each direction has its own. A record's nonce is its number in its direction:
a record that is repeated, left out, reordered or sent back to where it came from does not open.
"""

import functools
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pd_connector.transport.tcp.address import TcpAddress
from pd_connector.transport.tcp.frames import DialFrame, FrameError, answer, prefix
from pd_connector.transport.tcp.sealing import NOT_NEXT, Opener, Sealer
from pd_connector.transport.tcp.sums import SumOpener, SumSealer

_KEY_BYTES = 32
_RECORD_NONCE_BYTES = 12
_CPUINFO = Path("/proc/cpuinfo")
_AES_FLAGS = (" aes ", " pclmulqdq "), (" aes ", " pmull ")
"""Names in /proc/cpuinfo, on x86 and on ARM, of AES and of GCM's carry-less multiplication."""


class _OneWay:
    """The cipher of one direction, and the nonces of its records. Only AES-GCM can be given a body in parts."""

    in_clear = False

    def __init__(self, key: bytes, aes: bool) -> None:
        self.in_parts = aes
        self._aead = _aead(key, aes)
        self._key = algorithms.AES(key)
        self._records = 0

    def _next(self) -> bytes:
        self._records += 1  # 2^96 of them fit; a connection does not live that long
        return self._records.to_bytes(_RECORD_NONCE_BYTES, "little")


class AeadSealer(_OneWay):
    """A `Sealer`: encrypts."""

    def seal(self, head: bytes, body: bytes | memoryview, out: memoryview) -> None:
        self._aead.encrypt_into(self._next(), body, head, out)

    def seal_parts(self, head: bytes, parts: Iterable[Any], out: memoryview) -> bytes:
        context = Cipher(self._key, modes.GCM(self._next())).encryptor()
        context.authenticate_additional_data(head)
        at = 0
        for part in parts:
            at += context.update_into(part, out[at:])
        context.finalize()
        return context.tag

    def record(self, kind: int, body: bytes) -> bytes:
        head = prefix(kind, len(body))
        return head + self._aead.encrypt(self._next(), body, head)


class AeadOpener(_OneWay):
    """An `Opener`: decrypts."""

    def open(self, head: memoryview, sealed: memoryview, out: memoryview) -> None:
        try:
            self._aead.decrypt_into(self._next(), sealed, head, out)
        except InvalidTag:
            raise FrameError(NOT_NEXT) from None

    def open_parts(self, head: memoryview, sealed: memoryview, parts: Iterable[memoryview]) -> None:
        nonce = self._next()
        at = 0
        context = None
        for part in parts:
            if context is None:
                context = Cipher(self._key, modes.GCM(nonce)).decryptor()
                context.authenticate_additional_data(head)
            at += context.update_into(sealed[at : at + len(part)], part)
        if context is None:
            return
        try:
            context.finalize_with_tag(bytes(sealed[at:]))
        except InvalidTag:
            raise FrameError(NOT_NEXT) from None


def dial_code(shared: bytes, listener: TcpAddress, dial: DialFrame) -> bytes:
    """The dialler's proof that it knows the listener's secret."""
    return _mac(_derive(shared + listener.secret, b"", b"pd-tcp2 dial"), dial.encode())


class Handshake:
    """The codes and keys that both sides derive from one dial.

    Args:
        shared: secret of all engines; empty without a key.
        dialler: address of the dialling side.
        listener: address of the listening side.
        dial: the dialler's frame.
        nonce: the listener's nonce.

    Attributes:
        sealed: whether records have tags.
    """

    def __init__(
        self,
        shared: bytes,
        dialler: TcpAddress,
        listener: TcpAddress,
        dial: DialFrame,
        nonce: bytes,
    ) -> None:
        secrets = shared + listener.secret + dialler.secret
        keys = _derive(secrets, dial.nonce + nonce, b"pd-tcp2 keys" + dial.encode(), 3)
        self._answer_key = keys[:_KEY_BYTES]
        self._to_dialler, self._to_listener = keys[_KEY_BYTES:-_KEY_BYTES], keys[-_KEY_BYTES:]
        self._nonce = nonce
        self._encrypts = bool(shared)
        self._aes = dialler.fast_aes and listener.fast_aes
        self.sealed = self._encrypts or (dialler.sums and listener.sums)

    def answer_code(self) -> bytes:
        """The listener's proof."""
        return _mac(self._answer_key, self._nonce)

    def answer(self) -> bytes:
        """The listener's frame."""
        return answer(self._nonce, self.answer_code())

    def dialler_seals(self) -> tuple[Sealer, Opener]:
        """How the dialler seals its records, and opens the listener's; only if `sealed`."""
        return self._seals(self._to_listener, self._to_dialler)

    def listener_seals(self) -> tuple[Sealer, Opener]:
        return self._seals(self._to_dialler, self._to_listener)

    def _seals(self, outward: bytes, inward: bytes) -> tuple[Sealer, Opener]:
        if self._encrypts:
            return AeadSealer(outward, self._aes), AeadOpener(inward, self._aes)
        return SumSealer(), SumOpener()


def same(code: bytes, other: bytes) -> bool:
    """Whether two codes agree; takes the same time wherever they differ."""
    return hmac.compare_digest(code, other)


@functools.cache
def fast_aes() -> bool:
    """Whether this processor has instructions for AES-GCM; without them ChaCha20-Poly1305 is the
    faster cipher."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return True
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "") + " "
    return any(all(flag in flags for flag in required) for required in _AES_FLAGS)


def _aead(key: bytes, aes: bool) -> AESGCM | ChaCha20Poly1305:
    return AESGCM(key) if aes else ChaCha20Poly1305(key)


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _derive(secret: bytes, salt: bytes, purpose: bytes, keys: int = 1) -> bytes:
    return HKDF(SHA256(), _KEY_BYTES * keys, salt, purpose).derive(secret)
