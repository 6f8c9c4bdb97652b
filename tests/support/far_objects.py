# SPDX-License-Identifier: Apache-2.0
"""A far store in the process of a test, in the place of a carrier's client."""

from collections.abc import Callable, Sequence


class Objects:
    """Whole objects by name.

    Attributes:
        overwrites: whether `put` replaces what is there, or only answers as if it did.
        gives: whether what is listed can be read.
        refuses: names that `put` does not take.
    """

    def __init__(self, *, overwrites: bool = True) -> None:
        self.objects: dict[str, bytes] = {}
        self.overwrites, self.gives = overwrites, True
        self.refuses: Callable[[str], bool] = lambda name: False

    def has(self, names: Sequence[str]) -> list[int]:
        return [len(self.objects.get(name, b"")) for name in names]

    def get(
        self, names: Sequence[str], sizes: Sequence[int], take: Callable[[int, memoryview], None]
    ) -> None:
        for place, name in enumerate(names):
            take(place, memoryview(self.objects.get(name, b"") if self.gives else b""))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def put(
        self, names: Sequence[str], sizes: Sequence[int], fill: Callable[[int, memoryview], None]
    ) -> list[bool]:
        taken = []
        for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
            room = bytearray(size)
            fill(place, memoryview(room))
            taken.append(not self.refuses(name))
            if taken[-1] and (self.overwrites or name not in self.objects):
                self.objects[name] = bytes(room)
        return taken


class Far(Objects):
    """All three clients of a carrier."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready, self.killed, self.pid, self.problem = True, 0, 0, ""
        self.opened, self.since_s = 1, 0.0
        self.errors = self.looked = 0
        self.asked: set[str] = set()
        self.most_names = 0

    @property
    def chunks(self) -> int:
        """Objects that are chunks, not markers."""
        return sum(len(data) > 1000 for data in list(self.objects.values()))

    def has(self, names: Sequence[str]) -> list[int]:
        self.looked += 1
        self.asked.update(names)
        return super().has(names)

    def put(
        self, names: Sequence[str], sizes: Sequence[int], fill: Callable[[int, memoryview], None]
    ) -> list[bool]:
        self.most_names = max(self.most_names, len(names))
        return super().put(names, sizes, fill)

    def close(self) -> None: ...
