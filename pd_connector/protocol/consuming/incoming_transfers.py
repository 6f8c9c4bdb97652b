# SPDX-License-Identifier: Apache-2.0
"""All transfers of a consumer, found by name, producer, request or deadline."""

from collections.abc import Iterator

from pd_connector.protocol.consuming.incoming_transfer import IncomingTransfer
from pd_connector.protocol.deadlines import Deadlines
from pd_connector.protocol.wire.peers import Source


class IncomingTransfers:
    """The cost of a look-up grows with its result, not with the number of transfers. Used by one thread."""

    def __init__(self) -> None:
        self._transfers: dict[str, IncomingTransfer] = {}
        self._by_source: dict[Source, dict[str, None]] = {}
        self._names: dict[
            Source, tuple[str, ...]
        ] = {}  # the keys of `_by_source`, for sources that were asked for
        self._by_request: dict[str, str] = {}
        self._deadlines: Deadlines[str] = Deadlines()

    def __len__(self) -> int:
        return len(self._transfers)

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._transfers

    def __iter__(self) -> Iterator[IncomingTransfer]:
        return iter(self._transfers.values())

    def __getitem__(self, transfer: str) -> IncomingTransfer:
        return self._transfers[transfer]

    def get(self, transfer: str) -> IncomingTransfer | None:
        return self._transfers.get(transfer)

    def add(self, incoming: IncomingTransfer) -> None:
        """Add a transfer. Adding it again does no harm."""
        transfer = incoming.transfer
        self._transfers[transfer] = incoming
        self._by_request[incoming.request] = transfer
        for source in incoming.streams:
            self._by_source.setdefault(source, {})[transfer] = None
            self._names.pop(source, None)

    def remove(self, transfer: str) -> None:
        """Forget a transfer, if there is one of this name."""
        incoming = self._transfers.pop(transfer, None)
        if incoming is None:
            return
        self._deadlines.discard(transfer)
        if self._by_request.get(incoming.request) == transfer:
            del self._by_request[incoming.request]
        for source in incoming.streams:
            names = self._by_source[source]
            del names[transfer]
            self._names.pop(source, None)
            if not names:
                del self._by_source[source]

    def of_source(self, source: Source) -> tuple[str, ...]:
        """Names of the transfers with a stream from this producer. Returns the same tuple object until the names
        change."""
        names = self._names.get(source)
        if names is None:
            if source not in self._by_source:
                return ()
            names = self._names[source] = tuple(self._by_source[source])
        return names

    def has_source(self, source: Source) -> bool:
        return source in self._by_source

    def of_request(self, request: str) -> IncomingTransfer | None:
        return self._transfers.get(self._by_request.get(request, ""))

    def schedule(self, incoming: IncomingTransfer) -> None:
        """Set the transfer's deadline again: one has become earlier, or `due` has returned the transfer."""
        self._deadlines.set(incoming.transfer, incoming.next_deadline)

    def due(self, now: float) -> list[IncomingTransfer]:
        """Transfers whose deadline has passed. It may have been extended since it was set."""
        return [self._transfers[name] for name in self._deadlines.due(now)]

    def check_integrity(self) -> None:
        """Raises RuntimeError if the indexes disagree with the transfers, or a deadline is not set."""
        expected: dict[Source, set[str]] = {}
        for transfer, incoming in self._transfers.items():
            for source in incoming.streams:
                expected.setdefault(source, set()).add(transfer)
            if incoming.next_deadline < self._deadlines.at(transfer):
                raise RuntimeError(f"transfer {transfer}: its deadline is not watched")
        if expected != {source: set(names) for source, names in self._by_source.items()}:
            raise RuntimeError(f"transfers by producer {self._by_source}, wanted {expected}")
        if wrong := {s: n for s, n in self._names.items() if set(n) != expected.get(s, set())}:
            raise RuntimeError(f"names of transfers by producer {wrong}, wanted {expected}")
        if lost := set(self._by_request.values()) - self._transfers.keys():
            raise RuntimeError(f"transfers {lost} have ended, and their requests are kept")
