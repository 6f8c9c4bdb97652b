# SPDX-License-Identifier: Apache-2.0
"""Whether the next transfer of a session is coded, where the config says `codec: auto`.

A codec halves the bytes and costs processor time on both sides. KV comes at the smaller of two rates: the
link's, times what the codec saves, and the coders'. Both change, because other transfers use the link and
other work uses the processors. So the result is measured: bytes of KV a second, with the codec and without.
"""

PROBE = 16
"""If the slower way took as long as the faster one, it is measured again after this number of transfers. If
it took twice as long, it is measured again after four times that number. So measuring costs a few percent."""
SOON = 4
"""At first the slower way is measured again after this number of transfers, then after twice the number, and
so on. A codec is slow in the first transfers, while its loops are compiled; so is a connection that starts."""
CHANGED = 1.5
"""The slower way is measured again at once if the faster one's rate has changed by this factor since."""


class CodecChoice:
    """What was measured of one producer, and what follows for its next transfer.

    Args:
        saving: bytes of KV on the wire in `raw`, divided by those with the codec; above 1.

    >>> choice = CodecChoice(saving=2.0)
    >>> choice.measured(coded=True, wire_bytes_per_s=100e6)
    >>> choice.measured(coded=False, wire_bytes_per_s=900e6)
    >>> choice.coded, choice.describe()
    (False, 'raw: 900 MB of KV a second, 200 with the codec')
    """

    def __init__(self, saving: float) -> None:
        self.coded = True
        """Whether the next transfer is coded."""
        self._saving = saving
        self._faster: bool | None = None  # whether that is the codec
        self._told: bool | None = None  # the same, as the log has it
        self._rates: dict[bool, float] = {}  # wire bytes per second, by whether they were coded
        self._last: bool | None = None  # whether the transfer measured last was coded
        self._patience = SOON  # transfers before the slower way is measured again, at most
        self._since = 0  # transfers measured since the slower way was
        self._then = 0.0  # the faster way's rate when the slower one was measured

    @property
    def wire_bytes_per_s(self) -> float | None:
        """What the link moves as the next transfer will use it; None if that was not measured."""
        return self._rates.get(self.coded)

    def measured(self, *, coded: bool, wire_bytes_per_s: float) -> None:
        """A transfer that waited for nothing came at this rate."""
        if coded == self._last:
            wire_bytes_per_s = (self._rates[coded] + wire_bytes_per_s) / 2
        self._rates[coded] = wire_bytes_per_s  # what was measured longer ago is another link's
        self._last = coded
        other = not coded
        if other not in self._rates:
            self.coded = other
            return
        faster = self._kv_rate(True) >= self._kv_rate(False)
        if faster != self._faster:
            self._patience = SOON
        elif coded != faster:  # it is still the slower one
            self._patience *= 2
        self._faster = faster
        rate, slower_rate = self._kv_rate(faster), self._kv_rate(not faster)
        if coded != faster:
            self._since, self._then = 0, rate
        else:
            self._since += 1
            self._then = self._then or rate
        moved = max(rate / self._then, self._then / rate) if self._then else 1.0
        patience = min(self._patience, PROBE * (rate / slower_rate) ** 2)
        due = self._since >= patience or moved >= CHANGED
        self.coded = not faster if due else faster

    def news(self) -> str:
        """Once after each change of what is faster: which it is, with both rates. Otherwise ""."""
        if self._faster is None or self._faster == self._told:
            return ""
        self._told = self._faster
        return self.describe()

    def describe(self) -> str:
        """The two rates, for the log."""
        faster = bool(self._faster)
        rates = [f"{self._kv_rate(each) / 1e6:.0f}" for each in (faster, not faster)]
        name, other = ("codec", "in raw") if faster else ("raw", "with the codec")
        return f"{name}: {rates[0]} MB of KV a second, {rates[1]} {other}"

    def _kv_rate(self, coded: bool) -> float:
        """Bytes of KV a second; 0 where it was not measured."""
        return self._rates.get(coded, 0.0) * (self._saving if coded else 1.0)
