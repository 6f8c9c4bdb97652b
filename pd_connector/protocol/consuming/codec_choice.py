# SPDX-License-Identifier: Apache-2.0
"""Decides whether the next transfer of a session is coded, with `codec: auto`.

A codec halves the bytes, and costs processor time on both sides. The rate of KV is the smaller of two rates: the
link's rate times the codec's saving, and the coders' rate. Both rates change with the load of the link and of the processors.
So the rate of KV is measured, with the codec and without.
"""

PROBE = 16
"""Transfers until the slower way is measured again, if both take the same time. If it takes twice as long, four times as
many. So measuring costs a few percent."""
SOON = 4
"""Transfers until the slower way is measured again for the first time. The number then doubles each time. A codec is slow
in its first transfers, while its loops are compiled, and so is a new connection."""
CHANGED = 1.5
"""Factor: if the faster way's rate has changed by it, the slower way is measured again at once."""


class CodecChoice:
    """The measured rates of one producer's KV, and the choice for its next transfer.

    Args:
        saving: bytes on the wire in `raw`, divided by bytes on the wire with the codec; above 1.

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
        self._faster: bool | None = None  # whether the codec is the faster way
        self._logged: bool | None = None  # the value of `_faster` that was logged last
        self._rates: dict[bool, float] = {}  # wire bytes per second, by whether they were coded
        self._last: bool | None = None  # whether the last measured transfer was coded
        self._patience = SOON  # most transfers before the slower way is measured again
        self._since = 0  # transfers since the slower way was measured
        self._then = 0.0  # the faster way's rate when the slower one was measured

    @property
    def wire_bytes_per_s(self) -> float | None:
        """The link's measured rate in the way that the next transfer takes; None if it was not measured."""
        return self._rates.get(self.coded)

    def measured(self, *, coded: bool, wire_bytes_per_s: float) -> None:
        """A transfer that never waited for its prefill came at this rate."""
        if coded == self._last:
            wire_bytes_per_s = (self._rates[coded] + wire_bytes_per_s) / 2
        self._rates[coded] = (
            wire_bytes_per_s  # older measurements do not show the link's present load
        )
        self._last = coded
        other = not coded
        if other not in self._rates:
            self.coded = other
            return
        faster = self._kv_rate(True) >= self._kv_rate(False)
        if faster != self._faster:
            self._patience = SOON
        elif coded != faster:  # it is still the slower way
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
        """After the faster way has changed: its name and both rates, once, for the log. Otherwise ""."""
        if self._faster is None or self._faster == self._logged:
            return ""
        self._logged = self._faster
        return self.describe()

    def describe(self) -> str:
        """The two rates, for the log."""
        faster = bool(self._faster)
        rates = [f"{self._kv_rate(each) / 1e6:.0f}" for each in (faster, not faster)]
        name, other = ("codec", "in raw") if faster else ("raw", "with the codec")
        return f"{name}: {rates[0]} MB of KV a second, {rates[1]} {other}"

    def _kv_rate(self, coded: bool) -> float:
        """Bytes of KV a second; 0 if they were not measured."""
        return self._rates.get(coded, 0.0) * (self._saving if coded else 1.0)
