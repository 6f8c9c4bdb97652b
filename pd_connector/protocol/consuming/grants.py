# SPDX-License-Identifier: Apache-2.0
"""Grants a consumer's landing slots to producers, and takes them back."""

from collections import Counter
from collections.abc import Iterable, Mapping

from pd_connector.config import Config
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.consuming.incoming import Action, ProducerSession, Tell
from pd_connector.protocol.consuming.incoming_stream import IncomingStream
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Source

_SLOTS_DURING_PREFILL = 2
"""Most slots of a stream whose prefill is under way. More would lie unused."""

_ENOUGH_SLOTS = 8
"""Slots that a stream needs for full speed: producers write 3 or 4 chunks at a time."""
_BATCH = 4
"""Fewest slots in one grant to a stream at full speed. Each grant is a message, which wakes the agents of both sides."""

Key = tuple[str, Source]
"""A stream: the transfer, and the producer's rank that sends it."""


_TIMES = 3
"""Factor: a producer has at most 3 times the slots that are still free then. Alone, it has 12 of 16 slots. A larger factor
leaves fewer slots for others, a smaller one leaves more slots unused."""


class Shares:
    """The slots of each producer (an engine with all its ranks) at one moment, and how many more it can have.

    A producer that stops keeps its slots until a deadline. So no producer gets all slots: the next one always finds some
    free. The limit depends on the number of free slots ("dynamic thresholds": Choudhury and Hahne, IEEE/ACM Transactions on
    Networking 6(2), 1998), because most producers need no slots most of the time.

    Slots of prefills that are under way can lie unused for long. They are counted separately, and have at most half of all
    slots.

    Args:
        slots: number of all slots.
        free: number of free slots.
        alone: there is only one producer, and it can have all slots.
        has: (engine id, whether the prefill is under way, number of slots) of the producers.
    """

    def __init__(
        self, slots: int, free: int, *, alone: bool, has: Iterable[tuple[str, bool, int]]
    ) -> None:
        self._kept = (slots + 1) // 2
        self._free = free
        self._alone = alone
        self._has: Counter[tuple[str, bool]] = Counter()
        for producer, early, count in has:
            self._has[producer, early] += count

    def room(self, producer: str, *, early: bool) -> int:
        """The number of slots that this producer can have besides its present ones.

        Args:
            early: for a prefill that is under way. One slot at least is left for prefills that have ended.
        """
        room = self._part(producer, self._free, early=False)
        if early:
            room = min(room - 1, self._part(producer, self._free - self._kept, early=True))
        return max(0, room)

    def _part(self, producer: str, free: int, *, early: bool) -> int:
        if self._alone:
            return free
        has = self._has[producer, early]
        part = (_TIMES * free - has) // (_TIMES + 1)
        return max(part, min(free, 1)) if not has else part

    def take(self, producer: str, *, early: bool) -> None:
        """Count one free slot as lent to this producer."""
        self._free -= 1
        self._has[producer, early] += 1


class Grants:
    """The landing slots of one rank. Used by one thread.

    Args:
        sessions: with producers, as they come and go.
    """

    def __init__(
        self, config: Config, pool: SlotPool, sessions: Mapping[Source, ProducerSession]
    ) -> None:
        self._config = config
        self._pool = pool
        self._sessions = sessions
        self._holding: dict[Key, IncomingStream] = {}  # streams with slots
        # Streams that can use more slots, in the order in which they are served.
        self._waiting: dict[Key, IncomingStream] = {}
        # Cancelled streams, with their slots and a deadline. The slots are quarantined until
        # `Cancelled` comes or the deadline has passed. Until then the transfer cannot be loaded
        # again: `Cancelled` does not say which of two loads has ended.
        self._ending: dict[Key, tuple[list[int], float]] = {}
        # No waiting stream can have a free slot until a slot comes back or a stream needs more. So
        # thousands of streams are not looked at in every turn.
        self._settled = False

    def wait(self, transfer: str, source: Source, stream: IncomingStream) -> None:
        """This stream can use more slots, up to the number of its missing chunks."""
        self._waiting[transfer, source] = stream
        self._settled = False

    def grant(self, transfer: str, source: Source, stream: IncomingStream, most: int) -> list[int]:
        """Grant as many slots as the producer can have, up to `most`."""
        engine_id = self._sessions[source].engine_id
        room = self._shares().room(engine_id, early=stream.early) if most else 0
        return self._lend(transfer, source, stream, min(most, room))

    def _lend(self, transfer: str, source: Source, stream: IncomingStream, most: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < most and (slot := self._pool.lend((transfer, source))) is not None:
            taken.append(slot)
        stream.slots += taken
        if taken:
            self._holding[transfer, source] = stream
        return taken

    def _shares(self) -> Shares:
        """The slots of producers now. A producer can have all slots if no other has a session, and if its slots are free
        when its session ends: the next producer does not wait long then. Slots that lost sessions have left in
        quarantine belong to no producer."""
        sessions = self._sessions
        first = next(iter(sessions.values()), None)
        alone = all(
            first is not None and session.engine_id == first.engine_id and not session.writes_late
            for session in sessions.values()
        )
        lent = ((key[1], stream.early, len(stream.slots)) for key, stream in self._holding.items())
        ending = ((key[1], False, len(slots)) for key, (slots, _) in self._ending.items())
        has = (
            (sessions[source].engine_id, early, count)
            for source, early, count in (*lent, *ending)
            if source in sessions
        )
        return Shares(self._config.slots, self._pool.free, alone=alone, has=has)

    def holds(self, transfer: str, source: Source, slot: int) -> bool:
        """Whether this slot is granted to this stream."""
        return self._pool.holds((transfer, source), slot)

    def give_back(self, transfer: str, source: Source, stream: IncomingStream, slot: int) -> None:
        """The chunk in this slot has been placed."""
        stream.slots.remove(slot)
        if not stream.slots:
            del self._holding[transfer, source]
        self._pool.give_back(slot)
        self._settled = False

    def end_stream(
        self,
        transfer: str,
        source: Source,
        stream: IncomingStream,
        until: float,
        *,
        cancelled: bool,
    ) -> None:
        """A stream has ended. Its slots are quarantined until `until`, because its producer can still write into them.

        Args:
            cancelled: its producer will confirm the end of its writes with `Cancelled`.
        """
        self._waiting.pop((transfer, source), None)
        self._holding.pop((transfer, source), None)
        for slot in stream.slots:
            self._pool.quarantine(slot, until)
        if cancelled:
            self._ending[transfer, source] = stream.slots, until
        self._settled = False  # its producer's share has changed

    def is_ending(self, transfer: str, source: Source) -> bool:
        """Whether this stream was cancelled, and its producer has not confirmed that."""
        return (transfer, source) in self._ending

    def confirmed(self, transfer: str, source: Source) -> None:
        """The producer has confirmed the end of its writes for this transfer."""
        slots, _ = self._ending.pop((transfer, source), ([], 0.0))
        self._pool.release_quarantined(slots)
        self._settled = False

    def session_lost(self, source: Source, slots: list[int], *, silenced: bool) -> None:
        """The producer's session has ended: it confirms nothing any more. Its slots stay in quarantine, and do not count as
        its own if it begins another session.

        Args:
            slots: the slots of its streams that had not ended.
            silenced: the producer certainly writes no more. Its slots are free at once.
        """
        keys = [key for key in self._ending if key[1] == source]
        ending = [slot for key in keys for slot in self._ending.pop(key)[0]]
        if silenced:
            self._pool.release_quarantined(slots + ending)
        self._settled = False

    def tick(self, now: float) -> None:
        """Free the slots whose quarantine is over."""
        free = self._pool.free
        self._pool.tick(now)
        self._settled &= self._pool.free == free
        for key in [key for key, (_, until) in self._ending.items() if until <= now]:
            del self._ending[key]

    def grant_free(self, now: float) -> list[Action]:
        """Grant free slots to the streams that wait for slots, one slot at a time, in turn."""
        if self._settled or not self._pool.free:
            return []
        granted: dict[Key, list[int]] = {}
        shares, before = self._shares(), self._shares()
        progress = True
        while progress and self._pool.free:
            progress = False
            for key, stream in list(self._waiting.items()):
                if len(stream.slots) >= len(stream.missing):
                    del self._waiting[key]
                elif self._may_have(key[1], stream, shares, before):
                    if stream.complete and not stream.slots:
                        stream.deadline = now + self._config.stall_timeout_s
                    granted.setdefault(key, []).extend(self._lend(*key, stream, 1))
                    shares.take(self._sessions[key[1]].engine_id, early=stream.early)
                    # Behind those that have had none yet.
                    self._waiting[key] = self._waiting.pop(key)
                    progress = True
        self._settled = True
        return [
            Tell(source, messages.Credit(transfer, slots))
            for (transfer, source), slots in granted.items()
        ]

    def check_integrity(self, streams: Mapping[Key, IncomingStream]) -> None:
        """Raises RuntimeError unless every slot is in exactly one place.

        Args:
            streams: all streams that have not ended.
        """
        if self._pool.free + self._pool.held != self._config.slots:
            raise RuntimeError(
                f"landing slots: {self._pool.free} free and {self._pool.held} not, "
                f"wanted {self._config.slots}"
            )
        granted: dict[int, Key] = {}
        for key, stream in streams.items():
            for slot in stream.slots:
                if other := granted.get(slot):
                    raise RuntimeError(f"slot {slot} is granted to {other} and {key}")
                if not self._pool.holds(key, slot):
                    raise RuntimeError(f"slot {slot} is granted to {key}, which does not hold it")
                granted[slot] = key
        if self._holding != (
            has := {key: stream for key, stream in streams.items() if stream.slots}
        ):
            raise RuntimeError(f"{sorted(self._holding)} are known to have slots, {sorted(has)} do")
        if len(granted) > self._pool.held:
            raise RuntimeError(f"{len(granted)} slots are granted, {self._pool.held} are held")
        for key, (slots, _) in self._ending.items():
            if twice := granted.keys() & set(slots):
                raise RuntimeError(f"slots {sorted(twice)} are granted, and {key} still ends")
            if key in streams and streams[key].opened:
                raise RuntimeError(f"{key} is loaded again while its last load still ends")
        if self._settled and self._pool.free:
            shares = self._shares()
            for key, stream in self._waiting.items():
                more = len(stream.slots) < len(stream.missing)
                if more and self._may_have(key[1], stream, shares, shares):
                    raise RuntimeError(f"{self._pool.free} slots are free, and {key} gets none")
        if unknown := self._waiting.keys() - streams.keys():
            raise RuntimeError(f"{unknown} wait for slots, and have ended")

    def _may_have(
        self, source: Source, stream: IncomingStream, shares: Shares, before: Shares
    ) -> bool:
        """Whether a stream can have another slot.

        Args:
            shares: now.
            before: at the begin of this grant.
        """
        session = self._sessions.get(source)  # None: it has just ended, and the stream ends with it
        if session is None or not shares.room(session.engine_id, early=stream.early):
            return False
        if not stream.complete:  # more would lie unused
            return len(stream.slots) < _SLOTS_DURING_PREFILL
        few = len(stream.slots) < _ENOUGH_SLOTS
        return few or before.room(session.engine_id, early=False) >= _BATCH
