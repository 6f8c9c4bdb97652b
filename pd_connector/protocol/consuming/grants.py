# SPDX-License-Identifier: Apache-2.0
"""A consumer grants landing slots to producers, and takes them back."""

from collections.abc import Mapping

from pd_connector.config import Config
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.consuming.incoming import Action, Tell
from pd_connector.protocol.consuming.incoming_stream import IncomingStream
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Source

_SLOTS_DURING_PREFILL = 2
"""Slots of a stream whose prefill is still under way, at most: more would lie unused."""

_ENOUGH_SLOTS = 8
"""Slots with which a stream moves at full speed: producers write 3 or 4 chunks at a time."""
_BATCH = 4
"""Free slots that a stream at full speed is granted at a time, at least. Each grant is a message, which wakes
the agents of both sides."""

Key = tuple[str, Source]
"""A stream: the transfer, and the producer that sends its part of it."""


class Grants:
    """The landing slots of one rank. Used by one thread."""

    def __init__(self, config: Config, pool: SlotPool) -> None:
        self._config = config
        self._pool = pool
        # Streams that can use more slots, in the order in which they are served.
        self._waiting: dict[Key, IncomingStream] = {}
        # Streams that were cancelled, with their slots and a time. The slots are quarantined until
        # `Cancelled` comes or the time has passed. Until then the same transfer is not loaded
        # again: a `Cancelled` does not say which of two loads it confirms the end of.
        self._ending: dict[Key, tuple[list[int], float]] = {}
        # The number of free slots when no stream could take one. It is reset when a stream begins to
        # wait or to want more. So thousands of streams are not asked in every turn.
        self._unwanted = 0

    def wait(self, transfer: str, source: Source, stream: IncomingStream) -> None:
        """This stream can use more slots, as far as it has chunks for them."""
        self._waiting[transfer, source] = stream
        self._unwanted = 0

    def grant(
        self, transfer: str, source: Source, stream: IncomingStream, wanted: int
    ) -> list[int]:
        """Grant as many slots as there are, up to `wanted`."""
        taken: list[int] = []
        while len(taken) < wanted and (slot := self._pool.lend((transfer, source))) is not None:
            taken.append(slot)
        stream.slots += taken
        return taken

    def holds(self, transfer: str, source: Source, slot: int) -> bool:
        """Whether this slot is granted to this stream."""
        return self._pool.holds((transfer, source), slot)

    def give_back(self, stream: IncomingStream, slot: int) -> None:
        """The chunk in this slot has been placed."""
        stream.slots.remove(slot)
        self._pool.give_back(slot)

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
        for slot in stream.slots:
            self._pool.quarantine(slot, until)
        if cancelled:
            self._ending[transfer, source] = stream.slots, until

    def is_ending(self, transfer: str, source: Source) -> bool:
        """Whether this stream was cancelled and has not confirmed it yet."""
        return (transfer, source) in self._ending

    def confirmed(self, transfer: str, source: Source) -> None:
        """The producer writes nothing for this transfer any more."""
        slots, _ = self._ending.pop((transfer, source), ([], 0.0))
        self._pool.release_quarantined(slots)

    def session_lost(self, source: Source, slots: list[int], *, silenced: bool) -> None:
        """The producer will confirm nothing any more. If it is `silenced`, it also writes nothing
        any more into `slots` and the slots of its cancelled streams."""
        keys = [key for key in self._ending if key[1] == source]
        ending = [slot for key in keys for slot in self._ending.pop(key)[0]]
        if silenced:
            self._pool.release_quarantined(slots + ending)

    def tick(self, now: float) -> None:
        """Free the slots whose quarantine is over."""
        self._pool.tick(now)
        for key in [key for key, (_, until) in self._ending.items() if until <= now]:
            del self._ending[key]

    def grant_free(self, now: float) -> list[Action]:
        """Grant free slots to the streams that wait for some, one at a time in turn."""
        if self._pool.free <= self._unwanted:
            return []
        granted: dict[Key, list[int]] = {}
        free = self._pool.free
        progress = True
        while progress and self._pool.free:
            progress = False
            for key, stream in list(self._waiting.items()):
                if len(stream.slots) >= len(stream.missing):
                    del self._waiting[key]
                elif self._pool.free and len(stream.slots) < self._most(stream, free):
                    if stream.complete and not stream.slots:
                        stream.deadline = now + self._config.stall_timeout_s
                    granted.setdefault(key, []).extend(self.grant(*key, stream, 1))
                    # Behind those that have had none yet.
                    self._waiting[key] = self._waiting.pop(key)
                    progress = True
        self._unwanted = self._pool.free
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
        if len(granted) > self._pool.held:
            raise RuntimeError(f"{len(granted)} slots are granted, {self._pool.held} are held")
        for key, (slots, _) in self._ending.items():
            if twice := granted.keys() & set(slots):
                raise RuntimeError(f"slots {sorted(twice)} are granted, and {key} still ends")
            if key in streams and streams[key].opened:
                raise RuntimeError(f"{key} is loaded again while its last load still ends")
        if 0 < self._pool.free <= self._unwanted:
            for key, stream in self._waiting.items():
                if len(stream.slots) < self._most(stream, self._pool.free):
                    raise RuntimeError(f"{self._pool.free} slots are free, and {key} gets none")
        if unknown := self._waiting.keys() - streams.keys():
            raise RuntimeError(f"{unknown} wait for slots, and have ended")

    def _most(self, stream: IncomingStream, free: int) -> int:
        """How many slots a stream may have. `free` slots were free at the time of the request."""
        if stream.complete:
            can_wait = free < _BATCH and len(stream.slots) >= _ENOUGH_SLOTS
            return len(stream.slots) if can_wait else len(stream.missing)
        # A stream whose prefill is under way must leave slots for one that can move now.
        crowded = self._pool.free * 2 <= self._config.slots + 1
        return min(len(stream.missing), len(stream.slots) if crowded else _SLOTS_DURING_PREFILL)
