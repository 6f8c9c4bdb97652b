# SPDX-License-Identifier: Apache-2.0
"""All transfers of a producer, found by name, session or deadline, and the pages leased for them."""

from collections import Counter
from collections.abc import Iterator

from pd_connector.protocol.deadlines import Deadlines
from pd_connector.protocol.producing.outgoing import SessionId
from pd_connector.protocol.producing.outgoing_stream import OutgoingStream
from pd_connector.protocol.producing.outgoing_transfer import OutgoingTransfer

MOST_UNANNOUNCED = 1 << 17
"""Most transfers that consumers ask for before this engine has announced them."""
_SHARE_OF_ONE = 4
"""Divisor: one session has at most 1/4 of them."""


class OutgoingTransfers:
    """The cost of a look-up grows with its result, not with the number of transfers. Used by one thread."""

    def __init__(self) -> None:
        self._transfers: dict[str, OutgoingTransfer] = {}
        self._by_session: dict[SessionId, set[str]] = {}
        self._deadlines: Deadlines[str] = Deadlines()
        self._leases: dict[str, int] = {}  # pages by transfer, the oldest lease first
        self.leased_pages = 0
        self._kept: dict[SessionId, str] = {}  # by session: the transfer that is not evicted
        self._unannounced: dict[str, SessionId] = {}  # by transfer: the session that asked first
        self._unannounced_of: Counter[SessionId] = Counter()

    def __len__(self) -> int:
        return len(self._transfers)

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._transfers

    def __iter__(self) -> Iterator[OutgoingTransfer]:
        return iter(self._transfers.values())

    def __getitem__(self, transfer: str) -> OutgoingTransfer:
        return self._transfers[transfer]

    def get(self, transfer: str) -> OutgoingTransfer | None:
        return self._transfers.get(transfer)

    def announced(self, transfer: str) -> OutgoingTransfer:
        """The transfer of a request that this engine has queued or computed. A new transfer expires at once, unless the
        caller extends it."""
        self._announce(transfer)
        return self._transfers.get(transfer) or self._new(transfer, 0.0)

    def requested(
        self, session: SessionId, transfer: str, expires: float
    ) -> OutgoingTransfer | None:
        """The transfer that a consumer asks for. A new transfer is kept until `expires`. None if there are too many
        transfers."""
        if (outgoing := self._transfers.get(transfer)) is not None:
            return outgoing
        most = MOST_UNANNOUNCED
        of_session = self._unannounced_of[session]
        if len(self._unannounced) >= most or of_session >= most // _SHARE_OF_ONE:
            return None
        self._unannounced[transfer] = session
        self._unannounced_of[session] += 1
        return self._new(transfer, expires)

    def _new(self, transfer: str, expires: float) -> OutgoingTransfer:
        outgoing = self._transfers[transfer] = OutgoingTransfer(transfer, expires)
        self.schedule(outgoing)
        return outgoing

    def _announce(self, transfer: str) -> None:
        if (session := self._unannounced.pop(transfer, None)) is not None:
            self._unannounced_of[session] -= 1
            if not self._unannounced_of[session]:
                del self._unannounced_of[session]

    def stream(self, session: SessionId, transfer: str) -> OutgoingStream | None:
        """The stream of the transfer to this session; None if the session has not opened it."""
        outgoing = self._transfers.get(transfer)
        return None if outgoing is None else outgoing.streams.get(session)

    def touch(self, session: SessionId, outgoing: OutgoingTransfer) -> None:
        """Note that this session watches or reads the transfer, or has tried to."""
        outgoing.sessions.add(session)
        self._by_session.setdefault(session, set()).add(outgoing.transfer)

    def keep(self, session: SessionId, transfer: str) -> None:
        """Do not evict this transfer: the session's consumer will audit it. A session audits one at a time."""
        self._kept[session] = transfer

    def lose(self, session: SessionId) -> list[OutgoingTransfer]:
        """The session has ended. Returns the transfers that it has touched."""
        self._kept.pop(session, None)
        touched = [self._transfers[name] for name in self._by_session.pop(session, ())]
        for outgoing in touched:
            outgoing.sessions.discard(session)
        return touched

    def lease(self, outgoing: OutgoingTransfer) -> None:
        """The prefill has ended: lease the transfer's pages."""
        assert outgoing.offer is not None
        pages = sum(len(table) for table in outgoing.offer.pages)
        self._leases[outgoing.transfer] = pages
        self.leased_pages += pages

    def oldest_waiting(self, but: OutgoingTransfer | None = None) -> OutgoingTransfer | None:
        """The oldest leased transfer whose fetch has not begun, except for `but` and transfers that are kept for an
        audit."""
        kept = set(self._kept.values())
        for transfer in self._leases:
            outgoing = self._transfers[transfer]
            if outgoing is not but and outgoing.waits and transfer not in kept:
                return outgoing
        return None

    def remove(self, outgoing: OutgoingTransfer) -> None:
        transfer = outgoing.transfer
        del self._transfers[transfer]
        self._announce(transfer)
        self._deadlines.discard(transfer)
        self.leased_pages -= self._leases.pop(transfer, 0)
        for session in outgoing.sessions:
            names = self._by_session[session]
            names.discard(transfer)
            if not names:
                del self._by_session[session]

    def schedule(self, outgoing: OutgoingTransfer) -> None:
        """Set the transfer's deadline again: it expires earlier than before, or `due` has returned it."""
        self._deadlines.set(outgoing.transfer, outgoing.expires)

    def due(self, now: float) -> list[OutgoingTransfer]:
        """Transfers whose deadline has passed. They may have been extended since it was set."""
        return [self._transfers[name] for name in self._deadlines.due(now)]

    def check_integrity(self) -> None:
        """Raises RuntimeError if the indexes disagree with the transfers."""
        leased, by_session = 0, dict[SessionId, set[str]]()
        for transfer, outgoing in self._transfers.items():
            if outgoing.transfer != transfer:
                raise RuntimeError(f"transfer {outgoing.transfer}: is kept as {transfer}")
            if outgoing.expires < self._deadlines.at(transfer):
                raise RuntimeError(f"transfer {transfer}: its deadline is not watched")
            if outgoing.offer is not None and outgoing.final:
                leased += sum(len(table) for table in outgoing.offer.pages)
            for session in outgoing.sessions:
                by_session.setdefault(session, set()).add(transfer)
            if unknown := {*outgoing.streams, *outgoing.watchers} - outgoing.sessions:
                raise RuntimeError(f"transfer {transfer}: {unknown} would not be found")
        if leased != self.leased_pages or leased != sum(self._leases.values()):
            raise RuntimeError(f"{self.leased_pages} leased pages, wanted {leased}")
        unannounced = {
            name
            for name, outgoing in self._transfers.items()
            if not (outgoing.expected or outgoing.offer)
        }
        if unannounced != self._unannounced.keys():
            raise RuntimeError(f"{len(self._unannounced)} not announced, wanted {unannounced}")
        if self._unannounced_of != Counter(self._unannounced.values()):
            raise RuntimeError(f"transfers not announced by session {self._unannounced_of}")
        if by_session != self._by_session:
            raise RuntimeError(f"transfers by session {self._by_session}, wanted {by_session}")
