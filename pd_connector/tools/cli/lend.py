# SPDX-License-Identifier: Apache-2.0
"""`pd-connector pool lend`: lends memory of this host to Mooncake until it is told to end.

While it runs, the same command with another size changes the amount of lent memory: it sends a request to the running
process, over a socket in the pool's folder.
"""

import contextlib
import fcntl
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from pd_connector.errors import ConfigError
from pd_connector.hosts import without_secret
from pd_connector.pool.carrier.messages import SocketFolder, is_own_user, new_socket
from pd_connector.pool.far.registry import far_address
from pd_connector.pool.lending.lender import LEAST_PIECE, Lender, Recalled, piece_bytes
from pd_connector.pool.room import process_rooms
from pd_connector.pool.settings import bytes_of, make_above, memory_folder, text_of
from pd_connector.tools.cli.app import fail

SOCKET = "lender"
"""Name of the socket, in the folder of the memory tier."""
_SCHEME = "mooncake"
_MASTER_S = 5.0
"""Longest wait for one answer of the master, in seconds."""
_MOST_MESSAGE = 4096
_Reply = Callable[["Lent"], None]


class Resize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lend `memory` bytes from now on. Answered by `Lent`."""

    memory: int
    within_s: float


class Lent(msgspec.Struct, frozen=True):
    """How much is lent now, and what happened on the way."""

    text: str
    problem: str = ""


_requests, _answers = msgspec.msgpack.Decoder(Resize), msgspec.msgpack.Decoder(Lent)


def run(memory: str, far: str, recall_within_s: float, metrics: str) -> None:
    """Lend until SIGTERM or SIGINT, or change what is lent already. Ends the command if something cannot be used."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        nbytes = _size(memory)
        path = memory_folder()
        make_above(path)
        path.mkdir(mode=0o700, exist_ok=True)
        with _lock(path) as is_ours:
            if is_ours:
                _serve(nbytes, far, recall_within_s, path, metrics)
                return
        lent = _ask(path, Resize(nbytes, recall_within_s))
    except (ConfigError, OSError) as error:
        fail(str(error))
    if lent.problem:
        fail(lent.problem)
    print(lent.text)


def _size(memory: str) -> int:
    nbytes = bytes_of(memory)
    if nbytes is None:
        raise ConfigError(f"--memory {memory!r}: must be a size such as 64GiB")
    if nbytes and nbytes < LEAST_PIECE:
        raise ConfigError(
            f"--memory {memory}: must be {text_of(LEAST_PIECE)} or more, or 0GiB: an object must fit into one piece of it"
        )
    return nbytes


def _serve(nbytes: int, far: str, recall_within_s: float, path: Path, metrics: str) -> None:
    """Lend until the end. Raises ConfigError or OSError."""
    _, address = far_address(far, sealed=True)  # a lender opens nothing
    if address.scheme != _SCHEME:
        raise ConfigError(
            f"--far {without_secret(far)}: memory is lent to Mooncake only: must be {_SCHEME}://MASTER[:PORT]"
        )
    if not nbytes:
        raise ConfigError("--memory 0GiB: this host lends nothing, so there is nothing to recall")
    _check_room(nbytes, 0)
    requests: queue.SimpleQueue[tuple[Resize, _Reply] | None] = queue.SimpleQueue()
    lender = Lender(address, piece_bytes(nbytes), _MASTER_S)
    signals = 0

    def end(*_: object) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            lender.hurry()
        requests.put(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    if metrics:
        from pd_connector.pool.lending.metrics import LenderMetrics
        from pd_connector.tools.cli.metrics_port import MetricsPort

        MetricsPort(metrics, LenderMetrics(lender))  # until the process ends
    problem = ""
    try:
        lender.lend(nbytes)
        with _listening(path, requests):
            print(f"lending {text_of(lender.nbytes)} to {without_secret(far)}", flush=True)
            while not signals:
                request = requests.get()
                if request is not None:
                    _resize(lender, *request)
    except (ConfigError, OSError) as error:
        problem = str(error)
    except Exception as error:
        logging.getLogger(__name__).exception("nothing is lent any more")
        problem = repr(error)
    _end_at(time.monotonic() + recall_within_s)
    recalled = lender.recall(0, recall_within_s)
    if problem:
        print(f"failed: {problem}", file=sys.stderr, flush=True)
    if recalled.nbytes or not problem:
        print(_sentence(recalled, 0), flush=True)
    os._exit(bool(problem))  # Mooncake has threads that do not end


def _end_at(deadline_s: float) -> None:
    """End the process at the deadline, also if a silent master still blocks the recall, so that this host gets its
    memory back."""

    def wait() -> None:
        time.sleep(max(0.0, deadline_s - time.monotonic()))
        print(
            "the master did not answer in time: what was in the memory is lost",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _resize(lender: Lender, requested: Resize, reply: _Reply) -> None:
    try:
        if requested.memory > lender.nbytes:
            _check_room(requested.memory, lender.nbytes)
            lender.lend(requested.memory)
            text = f"{text_of(lender.nbytes)} are lent"
        else:
            recalled = lender.recall(requested.memory, requested.within_s)
            text = _sentence(recalled, lender.nbytes)
    except (ConfigError, OSError) as error:
        reply(Lent("", str(error)))
    else:
        logging.getLogger(__name__).info("%s", text)
        reply(Lent(text))


def _sentence(recalled: Recalled, left: int) -> str:
    lost = f", {recalled.lost:,} lost" if recalled.lost else ""
    if not recalled.is_known:
        lost = ", an unknown number lost"
    why = f" ({recalled.problem})" if recalled.problem else ""
    return (
        f"{text_of(recalled.nbytes)} recalled, {text_of(left)} are lent: {recalled.moved:,} objects moved, {recalled.copied:,} "
        f"copied that were in use{lost}{why}"
    )


def _check_room(nbytes: int, lent: int) -> None:
    room = process_rooms(lent)[0]
    if nbytes > room.nbytes:
        raise ConfigError(
            f"--memory {text_of(nbytes)}: {room.what} leaves {text_of(room.nbytes)}: ask for less, or {room.remedy}"
        )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Whether this process is the one that lends."""
    lock = os.open(
        path / f"{SOCKET}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except BlockingIOError:
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(lock)


@contextlib.contextmanager
def _listening(
    path: Path, requests: "queue.SimpleQueue[tuple[Resize, _Reply] | None]"
) -> Iterator[None]:
    """Takes requests of this user, one after another."""
    folder, listener = SocketFolder(path, SOCKET), new_socket()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder.path)
    listener.bind(folder.path)
    listener.listen()

    def accept() -> None:
        while True:
            try:
                channel, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                if is_own_user(channel):
                    channel.settimeout(_MASTER_S)
                    requested = _requests.decode(channel.recv(_MOST_MESSAGE))
                    requests.put((requested, _replies(channel)))
                    continue
            channel.close()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(folder.path)
        listener.close()


def _replies(channel: socket.socket) -> _Reply:
    def reply(lent: Lent) -> None:
        with contextlib.suppress(OSError):  # who asked has gone
            channel.sendall(msgspec.msgpack.encode(lent))
        channel.close()

    return reply


def _ask(path: Path, requested: Resize) -> Lent:
    """Change what is lent. Raises OSError."""
    folder = SocketFolder(path, SOCKET)
    with new_socket() as channel:
        try:
            channel.settimeout(requested.within_s + 60.0)
            channel.connect(folder.path)
            channel.sendall(msgspec.msgpack.encode(requested))
            if data := channel.recv(_MOST_MESSAGE):
                return _answers.decode(data)
        except OSError as error:
            raise OSError(
                f"{path / SOCKET}: this host lends memory already, but that process does not answer ({error})"
            ) from None
        finally:
            folder.close()
    raise OSError(f"{path / SOCKET}: the process that lends this host's memory has ended")
