# SPDX-License-Identifier: Apache-2.0
"""Which landing slots a consumer grants to which producer, and when they are its own again."""

from pd_connector.config import Config
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol import messages
from pd_connector.protocol.incoming import Action, IncomingStream, Tell
from pd_connector.protocol.peers import Source

_PATIENT_SLOTS = 2
"""Slots of a stream whose prefill is still under way; it would only sit on more."""

Key = tuple[str, Source]
"""A stream: the transfer, and who sends its part of it."""


class Grants:
    """The landing slots of one rank. Used by one thread."""

    def __init__(self, config: Config, pool: SlotPool) -> None:
        self._config = config
        self._pool = pool
        self._hungry: dict[Key, IncomingStream] = {}  # in the order in which they are served
        # Streams that were cancelled, and their slots: quarantined until `Cancelled` comes, or
        # until that time has passed. Until then the same transfer is not loaded again, for a
        # `Cancelled` does not say which of two ends it confirms.
        self._ending: dict[Key, tuple[list[int], float]] = {}

    def want(self, transfer: str, source: Source, stream: IncomingStream) -> None:
        """This stream could do with more slots, as far as it has chunks for them."""
        self._hungry[transfer, source] = stream

    def take(self, transfer: str, source: Source, stream: IncomingStream, wanted: int) -> list[int]:
        """Grant as many slots as there are, up to `wanted`."""
        taken: list[int] = []
        while len(taken) < wanted and (slot := self._pool.take((transfer, source))) is not None:
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

    def over(
        self,
        transfer: str,
        source: Source,
        stream: IncomingStream,
        until: float,
        *,
        cancelled: bool,
    ) -> None:
        """A stream has ended. What may still be written into its slots until `until` harms
        nobody; one that was `cancelled` says when it has stopped."""
        self._hungry.pop((transfer, source), None)
        for slot in stream.slots:
            self._pool.quarantine(slot, until)
        if cancelled:
            self._ending[transfer, source] = stream.slots, until

    def ends(self, transfer: str, source: Source) -> bool:
        """Whether this stream was cancelled and has not confirmed it yet."""
        return (transfer, source) in self._ending

    def stopped(self, transfer: str, source: Source) -> None:
        """The producer writes nothing for this transfer any more."""
        slots, _ = self._ending.pop((transfer, source), ([], 0.0))
        self._pool.absolve(slots)

    def lost(self, source: Source, slots: list[int], *, silenced: bool) -> None:
        """The producer will confirm nothing any more. If it is `silenced` it writes nothing any
        more either, into `slots` or those of its cancelled streams."""
        keys = [key for key in self._ending if key[1] == source]
        ending = [slot for key in keys for slot in self._ending.pop(key)[0]]
        if silenced:
            self._pool.absolve(slots + ending)

    def tick(self, now: float) -> None:
        """Free the slots whose quarantine is over."""
        self._pool.tick(now)
        for key in [key for key, (_, until) in self._ending.items() if until <= now]:
            del self._ending[key]

    def deal(self, now: float) -> list[Action]:
        """Grant free slots, one at a time in turn, to the streams that want some."""
        granted: dict[Key, list[int]] = {}
        progress = True
        while progress and self._pool.free:
            progress = False
            for key, stream in list(self._hungry.items()):
                if len(stream.slots) >= len(stream.missing):
                    del self._hungry[key]
                elif self._pool.free and len(stream.slots) < self._most(stream):
                    if stream.complete and not stream.slots:
                        stream.deadline = now + self._config.stall_timeout_s
                    granted.setdefault(key, []).extend(self.take(*key, stream, 1))
                    # Behind those that have had none yet.
                    self._hungry[key] = self._hungry.pop(key)
                    progress = True
        return [
            Tell(source, messages.Credit(transfer, slots))
            for (transfer, source), slots in granted.items()
        ]

    def _most(self, stream: IncomingStream) -> int:
        """How many slots a stream may have now."""
        if stream.complete:
            return len(stream.missing)
        # What only waits must leave room for what can move.
        crowded = self._pool.free * 2 <= self._config.slots + 1
        return min(len(stream.missing), len(stream.slots) if crowded else _PATIENT_SLOTS)
