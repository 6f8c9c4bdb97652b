# SPDX-License-Identifier: Apache-2.0
"""Decides how many chunks of a hit are loaded: those that load faster than they are computed, by measured speeds. Pure.

A tier that is not measured yet counts as fast, so the first hits are loaded. A tier that is too slow, or does not
answer, is left alone for a while. Then one of its chunks is read although no request waits for it (a probe). If the
probe was fast, the tier is used again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.store.base import FAR, Found

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 30.0
"""How long a tier, or the whole store, is left alone: first for `FIRST_PAUSE_S`, then each time for twice as long, up to
`LONGEST_PAUSE_S`."""

_NEW = 0.5
"""Weight of a new measurement. Two of them suffice to notice that a speed has changed."""
_MOST_WAIT = 0.5
"""A load that has waited for others for more than this part of its time measures no speed: how long it waited is an
estimate."""


def longest_wait_s(hits: Sequence[Found]) -> float:
    """How long a load of these chunks waits until its first chunk of the far store can come, in seconds."""
    return max((hit.wait_s for hit in hits), default=0.0)


@dataclass
class _Pause:
    """The pause after a failure, and when the next attempt is due. Length 0: nothing has failed."""

    length_s: float = 0.0
    until: float = 0.0

    def is_over(self, now: float) -> bool:
        """Whether it failed, and may be tried again."""
        return self.length_s > 0 and now >= self.until

    def begin(self, now: float) -> None:
        """It failed, perhaps again."""
        self.length_s = min(max(FIRST_PAUSE_S, 2 * self.length_s), LONGEST_PAUSE_S)
        self.until = now + self.length_s


@dataclass
class _Tier:
    """Measurements of one tier of the store.

    Attributes:
        silent: the pause after it did not answer. No chunk of it is loaded until a probe is answered.
        slow: the pause after it was found too slow.
        probed: whether its speed comes from a probe, which writes no page. The next load measures the full speed.
    """

    byte_s: float = 0.0  # seconds a byte
    measured: bool = False
    probed: bool = False
    silent: _Pause = field(default_factory=_Pause)
    slow: _Pause = field(default_factory=_Pause)


@dataclass
class LoadBreakeven:
    """Measured speeds of an engine's prefill and of its store's tiers, and the decision which chunks are worth
    loading."""

    _token_s: float | None = None
    _tiers: dict[str, _Tier] = field(default_factory=dict)

    def computed(self, tokens: int, seconds: float) -> None:
        """A prefill computed these tokens in this time."""
        new = seconds / tokens
        self._token_s = new if self._token_s is None else (1 - _NEW) * self._token_s + _NEW * new

    def loaded(self, tier: str, nbytes: int, seconds: float, wait_s: float = 0.0) -> None:
        """A load from one tier has ended: these bytes were read, verified and written into pages in this time.

        Args:
            wait_s: about how much of it other loads took before, in seconds.
        """
        measured = self._tier(tier)
        measured.silent = _Pause()
        if wait_s > _MOST_WAIT * seconds:
            return
        seconds -= wait_s
        old = 1 - _NEW if measured.measured and not measured.probed else 0.0
        measured.byte_s = old * measured.byte_s + (1 - old) * seconds / nbytes
        measured.measured, measured.probed = True, False

    def bytes_per_s(self) -> dict[str, float]:
        """The measured speed of each tier that something was loaded from."""
        # A copy: in SGLang another thread may meet a new tier meanwhile.
        measured = [(name, tier) for name, tier in list(self._tiers.items()) if tier.byte_s > 0]
        return {name: 1 / tier.byte_s for name, tier in measured}

    def seconds(self, tier: str, nbytes: int) -> float:
        """How long it takes to load these bytes from a tier; 0 if its speed is not measured."""
        return nbytes * self._tier(tier).byte_s

    def silent(self, tier: str, now: float) -> None:
        """A tier did not answer in time. Several loads under way can say so; only probes prolong the pause."""
        if not (pause := self._tier(tier).silent).length_s:
            pause.begin(now)

    def probe(self, hit: Sequence[tuple[str, int]], now: float) -> int | None:
        """The place of a chunk that is to be read as a probe, if its tier was left alone for long enough.

        Args:
            hit: as for `chunks`.
        """
        for place, (name, _) in enumerate(hit):
            tier = self._tier(name)
            for pause in (tier.silent, tier.slow):
                if pause.is_over(now):
                    pause.begin(now)
                    return place
        return None

    def probed(self, tier: str, nbytes: int, seconds: float, wait_s: float = 0.0) -> None:
        """A probe has ended: the tier has this speed at best.

        Args:
            wait_s: as for `loaded`.
        """
        measured = self._tier(tier)
        measured.silent = _Pause()
        if wait_s > _MOST_WAIT * seconds:
            return
        measured.byte_s = (seconds - wait_s) / nbytes
        measured.measured = measured.probed = True

    def chunks(self, hit: Sequence[tuple[str, int]], now: float, wait_s: float = 0.0) -> int:
        """How many chunks of a hit to load, from its first one on.

        Args:
            hit: tier and bytes of each chunk, in the order of the prompt.
            now: of any steady clock, in seconds.
            wait_s: how long other chunks are on their way before the first one of tier `FAR` can come, in seconds.
        """
        silent = (n for n, (tier, _) in enumerate(hit) if self._tier(tier).silent.length_s)
        hit = hit[: next(silent, len(hit))]
        best = self._best(hit)
        for tier in {tier for tier, _ in hit[:best]}:
            if not self._tier(tier).probed:
                self._tier(tier).slow = _Pause()
        if best < len(hit):
            slow = self._tier(hit[best][0]).slow
            if not slow.length_s:
                slow.begin(now)
        # A tier is not slow because others are loading from it.
        return self._best(hit, wait_s) if wait_s else best

    def _best(self, hit: Sequence[tuple[str, int]], wait_s: float = 0.0) -> int:
        """The number of chunks that saves most time."""
        if self._token_s is None:
            # Loads never show how long computing takes: the last chunk of the next hit is computed, to measure it.
            measured = any(self._tier(name).measured for name, _ in hit)
            return len(hit) - measured
        best, most, saved = 0, 0.0, 0.0
        for place, (name, nbytes) in enumerate(hit):
            if name == FAR:
                saved, wait_s = saved - wait_s, 0.0
            saved += CHUNK_TOKENS * self._token_s - nbytes * self._tier(name).byte_s
            if saved >= most:
                best, most = place + 1, saved
        return best

    def _tier(self, name: str) -> _Tier:
        return self._tiers.setdefault(name, _Tier())


@dataclass
class Answers:
    """Tracks whether the store answers look-ups in time. If not, it is left alone for a while; then one look-up is made
    that no request waits for."""

    _pause: _Pause = field(default_factory=_Pause)

    @property
    def waited_for(self) -> bool:
        """Whether requests may wait for their look-ups."""
        return not self._pause.length_s

    def asks(self, now: float) -> bool:
        """Whether a look-up may begin. While the store is left alone, one look-up in each pause."""
        if self.waited_for:
            return True
        if not self._pause.is_over(now):
            return False
        self._pause.begin(now)
        return True

    def late(self, now: float) -> None:
        """A look-up has taken too long, or still does."""
        if self.waited_for:
            self._pause.begin(now)

    def in_time(self) -> None:
        """A look-up has been answered in time."""
        self._pause = _Pause()
