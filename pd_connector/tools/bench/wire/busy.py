# SPDX-License-Identifier: Apache-2.0
"""A thread that is as busy as an engine's: in Python, or in many small calls of torch."""

import threading
import time
from collections.abc import Callable

import torch

KINDS = ("Python", "torch")
_ROUND = 200


class Busy:
    """Computes from its start until `stop`.

    Args:
        kind: `Python` keeps Python's lock until it is asked for it; `torch` gives it up for a
            moment in every call, as a model that is computed eagerly does.
    """

    def __init__(self, kind: str) -> None:
        self._round: Callable[[], None] = {"Python": _in_python, "torch": _in_torch}[kind]
        self._end = threading.Event()
        self._found = (0, 0.0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[int, float]:
        """Returns how many rounds there were, and their CPU seconds."""
        self._end.set()
        self._thread.join()
        return self._found

    def _run(self) -> None:
        rounds, began_s = 0, time.thread_time()
        while not self._end.is_set():
            self._round()
            rounds += 1
        self._found = rounds, time.thread_time() - began_s


def _in_python() -> None:
    seen: dict[int, int] = {}
    for number in range(_ROUND):
        seen[number % 17] = seen.get(number % 13, 0) + number


def _in_torch() -> None:
    x = torch.zeros(64)
    for _ in range(_ROUND // 10):
        x.add_(1)
