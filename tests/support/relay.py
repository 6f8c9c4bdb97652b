# SPDX-License-Identifier: Apache-2.0
"""A relay between two ends of a TCP connection, which fails as middleboxes do."""

import select
import socket
import struct
import threading
import time

_PIECE = 1 << 16
_RESET = struct.pack("ii", 1, 0)


class Relay:
    """Forwards every connection to `port` on loopback, in a thread of its own, until closed."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._forgotten: list[tuple[socket.socket, socket.socket]] = []
        self._doomed: list[tuple[socket.socket, socket.socket]] = []
        self._stop = False
        self._deaf = False
        self._left: int | None = None
        self._silently = False
        self.accepted = 0
        self.seen = bytearray()
        self.records = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Drop what comes on every connection there is, and say nothing; new ones are forwarded."""
        with self._lock:
            self._forgotten += self._pairs
            self._pairs = []

    def reset(self) -> None:
        """Reset every connection there is; new ones are forwarded."""
        with self._lock:
            self._doomed += self._pairs
            self._pairs = []
        while self._doomed:  # ended by the thread that selects on them
            time.sleep(0.001)

    def deafen(self, deaf: bool = True) -> None:
        """Accept connections from now on and never speak; those that there are go on."""
        self._deaf = deaf

    def cut_after(self, nbytes: int, *, silently: bool) -> None:
        """Forward `nbytes` bytes more to the dialling peer, then reset that connection, or forget it
        `silently`."""
        with self._lock:
            self._left, self._silently = nbytes, silently

    @property
    def has_cut(self) -> bool:
        """Whether what `cut_after` was told has happened."""
        return self._left is None

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self._end(self._pairs + self._forgotten)
        self._listener.close()

    def _end(self, pairs: list[tuple[socket.socket, socket.socket]]) -> None:
        for link in {one for pair in pairs for one in pair}:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            link.close()

    def _run(self) -> None:
        while not self._stop:
            with self._lock:
                self._end(self._doomed)
                self._doomed = []
                links = {link: pair for pair in self._pairs for link in pair}
            ready = select.select([self._listener, *links], [], [], 0.01)[0]
            with self._lock:
                for link in ready:
                    if link is self._listener:
                        self._accept()
                    elif links[link] in self._pairs:
                        self._forward(link, links[link])

    def _accept(self) -> None:
        inner, _ = self._listener.accept()
        self.accepted += 1
        if self._deaf:
            self._forgotten.append((inner, inner))
            return
        try:
            outer = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            inner.close()
            return
        self._pairs.append((inner, outer))

    def _forward(self, link: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        other = pair[1] if link is pair[0] else pair[0]
        try:
            data = link.recv(_PIECE)
            if self.records:
                self.seen += data
            if cut := self._left is not None and link is pair[1]:
                data = self._last_bytes(data)
                cut = self._left is None
            other.settimeout(5)
            other.sendall(data)
        except OSError:
            data, cut = b"", False
        if cut:
            self._pairs.remove(pair)
            (self._forgotten if self._silently else self._doomed).append(pair)
        elif not data:
            self._pairs.remove(pair)
            for one in pair:
                one.close()

    def _last_bytes(self, data: bytes) -> bytes:
        """What is still forwarded of this; the last of it where the connection is cut."""
        assert self._left is not None
        kept = data[: self._left]
        self._left = self._left - len(kept) if len(kept) == len(data) else None
        return kept
