# SPDX-License-Identifier: Apache-2.0
"""A consumer grants landing slots to producers, and takes them back."""

from collections import Counter
from collections.abc import Iterable, Mapping

from pd_connector.config import Config
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.consuming.incoming import Action, ProducerSession, Tell
from pd_connector.protocol.consuming.incoming_stream import IncomingStream
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Source

_SLOTS_DURING_PREFILL = 2
"""Slots of a stream whose prefill is still under way, at most: more would lie unused."""

_ENOUGH_SLOTS = 8
"""Slots with which a stream moves at full speed: producers write 3 or 4 chunks at a time."""
_BATCH = 4
"""Slots that a stream at full speed is granted at a time, at least. Each grant is a message, which wakes
the agents of both sides."""

Key = tuple[str, Source]
"""A stream: the transfer, and the producer that sends its part of it."""


_TIMES = 3
"""A producer has at most this many times the slots that are free afterwards. More would leave fewer for
others. Fewer would leave more unused: of 16 slots a producer has 12 at most while no other has any."""


class Shares:
    """What each producer (an engine, with all of its ranks) has at one moment, and may have besides.

    A producer that stops keeps its slots until a deadline. So none may have all of them: the next one always
    finds some free. The limit depends on what is free ("dynamic thresholds": Choudhury and Hahne, IEEE/ACM
    Transactions on Networking 6(2), 1998), because most producers want nothing most of the time.

    Slots of prefills that are under way are counted apart. They may lie unused for long, so half of all slots
    are not lent to such prefills.

    Args:
        slots: all of them.
        free: those that are free.
        alone: whether there is one producer only, and it may have all.
        has: slots of producers, by engine id and whether their prefill is under way.
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
        """How many more slots this producer may have now.

        Args:
            early: for prefills that are under way. At least one slot is left for those that have ended.
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
        """One free slot is lent to this producer."""
        self._free -= 1
        self._has[producer, early] += 1


class Grants:
    """The landing slots of one rank. Used by one thread.

    Args:
        sessions: those that stand.
    """

    def __init__(
        self, config: Config, pool: SlotPool, sessions: Mapping[Source, ProducerSession]
    ) -> None:
        self._config = config
        self._pool = pool
        self._sessions = sessions
        self._holding: dict[Key, IncomingStream] = {}  # streams that have slots
        # Streams that can use more slots, in the order in which they are served.
        self._waiting: dict[Key, IncomingStream] = {}
        # Streams that were cancelled, with their slots and a time. The slots are quarantined until
        # `Cancelled` comes or the time has passed. Until then the same transfer is not loaded
        # again: a `Cancelled` does not say which of two loads it confirms the end of.
        self._ending: dict[Key, tuple[list[int], float]] = {}
        # No stream can take a slot that is free, until one comes home or a stream wants more. So
        # thousands of streams are not asked in every turn.
        self._settled = False

    def wait(self, transfer: str, source: Source, stream: IncomingStream) -> None:
        """This stream can use more slots, as far as it has chunks for them."""
        self._waiting[transfer, source] = stream
        self._settled = False

    def grant(
        self, transfer: str, source: Source, stream: IncomingStream, wanted: int
    ) -> list[int]:
        """Grant as many slots as its producer may have, up to `wanted`."""
        engine_id = self._sessions[source].engine_id
        room = self._shares().room(engine_id, early=stream.early) if wanted else 0
        return self._lend(transfer, source, stream, min(wanted, room))

    def _lend(
        self, transfer: str, source: Source, stream: IncomingStream, wanted: int
    ) -> list[int]:
        taken: list[int] = []
        while len(taken) < wanted and (slot := self._pool.lend((transfer, source))) is not None:
            taken.append(slot)
        stream.slots += taken
        if taken:
            self._holding[transfer, source] = stream
        return taken

    def _shares(self) -> Shares:
        """What producers have now. One may have all slots if no other has a session, and its slots come home with
        its session: then the next one does not wait long. What lost sessions have left in quarantine is
        nobody's."""
        known = self._sessions
        first = next(iter(known.values()), None)
        alone = all(
            first is not None and one.engine_id == first.engine_id and not one.writes_late
            for one in known.values()
        )
        lent = ((key[1], one.early, len(one.slots)) for key, one in self._holding.items())
        ending = ((key[1], False, len(slots)) for key, (slots, _) in self._ending.items())
        has = (
            (known[source].engine_id, early, count)
            for source, early, count in (*lent, *ending)
            if source in known
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
        """A stream has ended. Its slots are quarantined until `until`, because its producer may still
        write into them. If the stream was `cancelled`, its producer says when it has stopped."""
        self._waiting.pop((transfer, source), None)
        self._holding.pop((transfer, source), None)
        for slot in stream.slots:
            self._pool.quarantine(slot, until)
        if cancelled:
            self._ending[transfer, source] = stream.slots, until
        self._settled = False  # its producer has fewer slots, or counts them otherwise

    def is_ending(self, transfer: str, source: Source) -> bool:
        """Whether this stream was cancelled and has not confirmed it yet."""
        return (transfer, source) in self._ending

    def confirmed(self, transfer: str, source: Source) -> None:
        """The producer writes nothing for this transfer any more."""
        slots, _ = self._ending.pop((transfer, source), ([], 0.0))
        self._pool.release_quarantined(slots)
        self._settled = False

    def session_lost(self, source: Source, slots: list[int], *, silenced: bool) -> None:
        """The producer will confirm nothing any more. If it is `silenced`, it also writes nothing
        any more into `slots` and the slots of its cancelled streams. If not, they stay in quarantine,
        and do not count as its own if it begins another session."""
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
        """Grant free slots to the streams that wait for some, one at a time in turn."""
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
            streams: all that have not ended.
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
        if self._holding != (has := {key: one for key, one in streams.items() if one.slots}):
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
        """Whether a stream may have another slot. `before`: when it could have the first of these."""
        session = self._sessions.get(source)  # None: it has just ended, and the stream ends with it
        if session is None or not shares.room(session.engine_id, early=stream.early):
            return False
        if not stream.complete:  # more would lie unused
            return len(stream.slots) < _SLOTS_DURING_PREFILL
        few = len(stream.slots) < _ENOUGH_SLOTS
        return few or before.room(session.engine_id, early=False) >= _BATCH
