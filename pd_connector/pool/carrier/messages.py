# SPDX-License-Identifier: Apache-2.0
"""The messages between engines and the carrier of their host, over a socket in the pool's folder. One message, one
packet."""

import os
import socket
import struct
from pathlib import Path
from typing import Annotated

import msgspec

SOCKET = "carrier"
"""Name of the socket, in the folder of the memory tier."""
MOST_KEYS = 1024
"""Keys in a message. Chunks of a longer chain are not looked for in the far store."""
MOST_MESSAGE = 128 << 10
MOST_PAGE = 1536
"""Events in a page of what the far store has."""
BEAT_S = 0.1
"""While an engine waits for a chunk, the carrier says so often that it is alive, in seconds."""

Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=MOST_KEYS)]


class Find(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="find"):
    """Which of the first chunks of a chain are in the far store? Answered by `Sizes`."""

    keys: Keys


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sizes"):
    """Bytes of the chunks that are there, from the first one on."""

    sizes: Annotated[list[int], msgspec.Meta(max_length=MOST_KEYS)]
    silent: bool = False
    """The far store does not answer."""
    wait_s: float = 0.0
    """How long other chunks are on their way before the last one of these can come, in seconds."""


class Bring(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="bring"):
    """Bring chunks into the host's memory. With one key and `waits` answered by `Brought`, else by `Noted`."""

    keys: Keys
    waits: bool = True


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """The chunks are on their way."""


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """The chunk is still on its way."""

    ended: int = 0
    """Chunks that have come to this host so far, or turned out not to come: while it grows, others come before this one."""


class Brought(msgspec.Struct, frozen=True, tag="brought"):
    """The chunk is there, or why it is not."""

    cause: str = ""
    """A `Miss`; empty: it is there."""
    detail: str = ""


class Ask(msgspec.Struct, frozen=True, tag="status"):
    """How is it? Answered by `Status`."""


class AskFar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="far"):
    """What has changed in the far store since a page? Answered by `FarPage`."""

    after: int
    """`next` of the page before; 0: the whole."""


class FarPage(msgspec.Struct, frozen=True, tag="page"):
    """What a carrier has put into the far store or found there."""

    far: str
    """The far store's id, the same at all carriers; empty while it is not known."""
    events: Annotated[list[tuple[Key, bool]], msgspec.Meta(max_length=MOST_PAGE)]
    """A chunk, and whether it is there."""
    next: int
    whole: bool = False
    """The page begins the whole journal."""
    more: bool = False


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="check"):
    """Read a chunk of the far store and verify it, without keeping it here. Answered by `Checked`."""

    key: Key
    remove: bool = False
    """Remove it there if it is damaged."""


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """A chunk of the far store that was read."""

    nbytes: int
    """0: it is not there any more."""
    problem: str = ""
    """What is wrong with it; empty: nothing."""
    silent: str = ""
    """Why the far store could not be asked."""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="is"):
    """What a carrier has done since its start."""

    far: str
    """The store's address, without a password."""
    sealed: bool
    mark: str = ""
    """The far store's id, the same at all carriers; empty while it is not known."""
    problem: str = ""
    """Why the far store cannot be used at the moment."""
    since_s: float = 0.0
    """Unix time since when it can be used, or cannot; 0: this carrier does not tell."""
    most_bytes: int = 0
    """Bytes of the largest object that it takes."""
    waiting: int = 0
    """Chunks that wait to be put."""
    bringing: int = 0
    """Chunks that engines asked for and that are on their way."""
    counts: dict[str, int] = {}


Request = Find | Bring | Ask | AskFar | Check
Answer = Sizes | Noted | Waiting | Brought | Status | FarPage | Checked
requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """A message as a packet."""
    return msgspec.msgpack.encode(message)


def new_socket() -> socket.socket:
    """A socket whose packets are messages."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def is_own_user(channel: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack(
        "3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return int(user) == os.geteuid()


class SocketFolder:
    """The folder of a socket, by a descriptor: a socket's whole path may have 107 bytes only."""

    def __init__(self, folder: Path, name: str = SOCKET) -> None:
        self._name = name
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def path(self) -> str:
        """A short path of the socket."""
        return f"/proc/self/fd/{self._descriptor}/{self._name}"

    def is_at(self, folder: Path) -> bool:
        """Whether this is still the folder at that path. Raises OSError if there is none."""
        return os.path.samestat(os.fstat(self._descriptor), os.stat(folder))

    def close(self) -> None:
        """Close the folder."""
        os.close(self._descriptor)
