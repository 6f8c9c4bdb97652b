# SPDX-License-Identifier: Apache-2.0
"""Answers engines of this host: of this user only, by schema, with limits. A bad message costs its sender the connection."""

import contextlib
import fcntl
import logging
import os
import socket
import threading
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec

from pd_connector.errors import ConfigError
from pd_connector.pool.carrier.carrier import Carrier
from pd_connector.pool.carrier.lasting import LastingThread
from pd_connector.pool.carrier.messages import (
    BEAT_S,
    MOST_MESSAGE,
    SOCKET,
    Ask,
    AskFar,
    Bring,
    Brought,
    Check,
    Find,
    Noted,
    SocketFolder,
    Waiting,
    encode,
    is_own_user,
    new_socket,
    requests,
)

logger = logging.getLogger("pd_connector.pool.carrier")

_MOST_CONNECTIONS = 256
_LOOKS_EVERY_S = 1.0
"""How often the carrier looks whether its folder is still the one that engines see, in seconds."""
_SENDS_S = 1.0
"""Longest time in which an engine takes its answer, in seconds. Then it is disconnected."""


class CarrierServer:
    """Listens in the folder of the memory tier.

    Raises:
        ConfigError: another carrier serves this host's pool.
    """

    def __init__(self, carrier: Carrier, folder: Path) -> None:
        self._carrier, self._path = carrier, folder
        self._folder, self._lock, self._listener = _listening(folder)
        self._connections: set[socket.socket] = set()
        self._ends = threading.Event()
        self._binding = threading.Lock()  # while the three are replaced, and at the end
        LastingThread("pd-carrier-accept", self._accept, self._ends)

    def close(self) -> None:
        """Hang up, and remove the socket."""
        with self._binding:
            self._ends.set()
        with contextlib.suppress(OSError):
            os.unlink(self._folder.path)
        for each in (self._listener, *list(self._connections)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        os.close(self._lock)
        self._folder.close()

    def _accept(self) -> None:
        """Take one connection, or look for the folder."""
        try:
            channel, _ = self._listener.accept()
        except TimeoutError:
            self._follow_folder()
            return
        except OSError:  # the end, or no descriptor is left
            self._ends.wait(BEAT_S)
            return
        self._connections.add(channel)
        try:
            if len(self._connections) <= _MOST_CONNECTIONS and is_own_user(channel):
                threading.Thread(target=self._serve, args=(channel,), daemon=True).start()
                return
        except (OSError, RuntimeError) as error:  # it hung up, or no thread can be started
            logger.warning("carrier: a connection is not served: %r", error)
        self._connections.discard(channel)
        channel.close()

    def _follow_folder(self) -> None:
        """If the folder was removed and made again, listen in the new one: engines look there."""
        with self._binding, contextlib.suppress(OSError):
            if self._ends.is_set() or self._folder.is_at(self._path):
                return
            try:
                made = _listening(self._path)
            except ConfigError as error:
                logger.warning("carrier: %s", error)
                return
            self._listener.close()
            os.close(self._lock)
            self._folder.close()
            self._folder, self._lock, self._listener = made
            logger.warning("carrier: %s was made again; it listens there now", self._path)

    def _serve(self, channel: socket.socket) -> None:
        try:
            while data := channel.recv(MOST_MESSAGE):
                self._answer(channel, data)
        except (OSError, msgspec.MsgspecError) as error:
            if not self._ends.is_set():
                logger.info("carrier: an engine's connection ends: %r", error)
        except Exception:
            logger.exception("carrier: a connection ends")
        finally:
            self._connections.discard(channel)
            channel.close()

    def _answer(self, channel: socket.socket, data: bytes) -> None:
        message = requests.decode(data)
        if isinstance(message, Find):
            _send(channel, encode(self._carrier.find(message.keys)))
        elif isinstance(message, Ask):
            _send(channel, encode(self._carrier.status()))
        elif isinstance(message, Check):
            _send(channel, encode(self._carrier.check(message.key, removes=message.remove)))
        elif isinstance(message, AskFar):
            _send(channel, encode(self._carrier.journal.page(message.after)))
        elif isinstance(message, Bring):
            futures = self._carrier.bring(message.keys)
            waits = message.waits and futures
            _send(channel, encode(self._ended(channel, futures[0]) if waits else Noted()))

    def _ended(self, channel: socket.socket, future: "Future[Brought]") -> Brought:
        """Wait for a chunk, and tell the engine meanwhile that the carrier still works, and how many chunks have come."""
        while not future.done():
            wait([future], BEAT_S)
            if not future.done():
                _send(channel, encode(Waiting(self._carrier.ended)))
        return future.result()


def _listening(path: Path) -> tuple[SocketFolder, int, socket.socket]:
    """The folder, its lock, which a carrier holds, and a socket that listens there. Raises ConfigError."""
    folder = SocketFolder(path)
    lock = os.open(
        path / f"{SOCKET}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        folder.close()
        raise ConfigError(
            f"{path}: another carrier serves this pool: a host has one carrier; end the other one first"
        ) from None
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder.path)
    listener = new_socket()
    listener.bind(folder.path)
    listener.listen(_MOST_CONNECTIONS)
    listener.settimeout(_LOOKS_EVERY_S)
    return folder, lock, listener


def _send(channel: socket.socket, packet: bytes) -> None:
    channel.settimeout(_SENDS_S)
    channel.sendall(packet)
    channel.settimeout(None)
