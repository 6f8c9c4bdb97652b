# SPDX-License-Identifier: Apache-2.0
"""Seals objects of a far store: a stranger's writes can only cause misses, and a stranger's reads show only sizes and
times.

An object's name is a keyed hash of its chunk's key. An object is `HEADER` and then blocks of 1 MiB, the last one shorter, each
encrypted with AES-256-GCM under a key of the object's own, which is derived from its random salt. Each block is bound to the
object's name, its place, the number of blocks, the length of the whole and the schema.

Without a key, names are plain hashes and contents are as they are; `far/registry.py` accepts only loopback then.

Schema history. 1: the first.
"""

import hashlib
import os
import re
import secrets
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pd_connector.errors import ConfigError, Miss, PoolError

SCHEMA = 1
BLOCK_BYTES = 1 << 20
TAG_BYTES = 16
SALT_BYTES = 32
KEY_ID_BYTES = 8
MAGIC_SEALED, MAGIC_PLAIN = b"pd-seal\n", b"pd-open\n"
HEADER = struct.Struct(f"<8sIIQ{KEY_ID_BYTES}s{SALT_BYTES}s")
"""Magic, schema, number of blocks, bytes of the contents, id of the key, salt."""
MOST_KEYS = 2
_KEY = re.compile(r"[0-9a-f]{64}")
_OTHERS = 0o077


ReadInto = Callable[[memoryview, int], None]


class ReadKey(NamedTuple):
    """What is derived from one line of a key file."""

    id: bytes
    naming: bytes
    sealing: bytes


class Seal:
    """Seals with the first key, and opens with each. Any thread may use it.

    Args:
        keys: keys of 32 bytes; none: nothing is sealed.
    """

    def __init__(self, keys: tuple[bytes, ...] = ()) -> None:
        self._keys = tuple(
            ReadKey(
                _derived(key, b"pd-far-id")[:KEY_ID_BYTES],
                _derived(key, b"pd-far-name"),
                _derived(key, b"pd-far-seal"),
            )
            for key in keys
        )
        self._own = threading.local()

    @property
    def is_on(self) -> bool:
        """Whether there is a key."""
        return bool(self._keys)

    def names(self, key: bytes) -> list[str]:
        """The possible names of a chunk, one for each key. New objects get the first name."""
        if not self._keys:
            return [hashlib.blake2b(key, digest_size=32, person=b"pd-far-plain").hexdigest()]
        return [
            hashlib.blake2b(key, digest_size=32, key=each.naming, person=b"pd-far-name").hexdigest()
            for each in self._keys
        ]

    def sealed_bytes(self, nbytes: int) -> int:
        """The length of an object with contents of `nbytes`."""
        tags = _blocks(nbytes) * TAG_BYTES if self._keys else 0
        return HEADER.size + nbytes + tags

    def seal(self, name: str, nbytes: int, read: ReadInto, out: memoryview) -> None:
        """Seal an object.

        Args:
            name: from `names(...)[0]`.
            nbytes: size of its contents.
            read: called with a buffer and an offset; fills the buffer with the contents from there on. Called block by
                block, so that a block is sealed while the CPU's cache still has it.
            out: `sealed_bytes(nbytes)` bytes.
        """
        blocks = _blocks(nbytes)
        if not self._keys:
            head = HEADER.pack(
                MAGIC_PLAIN, SCHEMA, blocks, nbytes, bytes(KEY_ID_BYTES), bytes(SALT_BYTES)
            )
            out[: len(head)] = head
            read(out[len(head) :], 0)
            return
        own, salt = self._keys[0], secrets.token_bytes(SALT_BYTES)
        head = HEADER.pack(MAGIC_SEALED, SCHEMA, blocks, nbytes, own.id, salt)
        out[: len(head)] = head
        aead, bound, at = AESGCM(_object_key(own.sealing, salt)), _bound(name, head), len(head)
        room = self._room()
        for place in range(blocks):
            block = room[: nbytes - place * BLOCK_BYTES]
            read(block, place * BLOCK_BYTES)
            stop = at + len(block) + TAG_BYTES
            aead.encrypt_into(_nonce(place), block, bound + _nonce(place), out[at:stop])
            at = stop

    def _room(self) -> memoryview:
        """Memory of this thread for a block that is not sealed yet. It is kept: the kernel clears new memory page by
        page."""
        room: memoryview | None = getattr(self._own, "room", None)
        if room is None:
            room = self._own.room = memoryview(bytearray(BLOCK_BYTES))
        return room

    def open(self, name: str, sealed: memoryview) -> bytearray:
        """Open an object in memory of its own. Others may change `sealed` meanwhile: each byte of it is read once.

        Raises:
            PoolError: DAMAGED, it is not what was put under this name.
        """
        head = bytes(sealed[: HEADER.size])
        if len(head) < HEADER.size:
            raise _damaged("is cut")
        magic, schema, blocks, nbytes, key_id, salt = HEADER.unpack(head)
        if magic != (MAGIC_SEALED if self._keys else MAGIC_PLAIN):
            raise _damaged("is not sealed" if self._keys else "is sealed, and there is no key")
        if schema != SCHEMA:
            raise _damaged(f"has schema {schema}, not {SCHEMA}")
        if blocks != _blocks(nbytes) or len(sealed) != self.sealed_bytes(nbytes):
            raise _damaged("has another length than it says")
        if not self._keys:
            return bytearray(sealed[HEADER.size :])
        own = next((each for each in self._keys if each.id == key_id), None)
        if own is None:
            raise _damaged("is sealed with another key")
        contents = bytearray(nbytes)
        room, aead = memoryview(contents), AESGCM(_object_key(own.sealing, salt))
        bound, at = _bound(name, head), HEADER.size
        for place in range(blocks):
            block = room[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
            stop = at + len(block) + TAG_BYTES
            own_copy = bytes(sealed[at:stop])  # what is authenticated is what is decrypted
            try:
                aead.decrypt_into(_nonce(place), own_copy, bound + _nonce(place), block)
            except InvalidTag:
                raise _damaged(f"block {place} does not open") from None
            at = stop
        return contents


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The keys of a key file: one a line, the first seals, a second one only opens.

    Raises:
        ConfigError: the file cannot be read, is open to others, or has no keys.
    """
    advice = "make one with `pd-connector key > FILE` and `chmod 600 FILE`, the same on all hosts (--key-file)"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: is not a file: {advice}")
            if status.st_mode & _OTHERS or status.st_uid not in (os.geteuid(), 0):
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(
                    f"{path}: mode {mode:o} of user {status.st_uid}: others can read or replace the key; it must be of user "
                    f"{os.geteuid()} with mode 600: chmod 600 {path} (--key-file)"
                )
            lines = [line.strip() for line in file.read(4096).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path}: cannot be read: {why}: {advice}") from None
    if not 1 <= len(lines) <= MOST_KEYS:
        raise ConfigError(
            f"{path}: has {len(lines)} keys: must have one, or two while the key is changed, one a line: {advice}"
        )
    for number, line in enumerate(lines, 1):
        if not _KEY.fullmatch(line):
            raise ConfigError(
                f"{path}: line {number} is not a key of 64 hexadecimal digits: {advice}"
            )
    if len(set(lines)) < len(lines):
        raise ConfigError(f"{path}: both keys are the same: {advice}")
    return tuple(map(bytes.fromhex, lines))


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32, person=purpose).digest()


def _object_key(sealing: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(salt, digest_size=32, key=sealing, person=b"pd-far-object").digest()


def _bound(name: str, head: bytes) -> bytes:
    """The associated data of all blocks, without a block's place: name, schema, count, length, key and salt."""
    return name.encode() + head


def _nonce(place: int) -> bytes:
    """A block's place. The key is the object's own, so no nonce comes twice."""
    return place.to_bytes(12, "little")


def _blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def _damaged(what: str) -> PoolError:
    return PoolError(Miss.DAMAGED, f"the far store's object {what}")
