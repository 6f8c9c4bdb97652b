# SPDX-License-Identifier: Apache-2.0
"""Lends memory to a Mooncake store in pieces, and recalls pieces without losing what is in them.

A piece has a client of its own, because the master drains all segments of a client at once. A recall has three steps:

1. The master's drain job moves objects to other nodes. An object that was just read or queried stays, because it has a
lease. 2. The remaining objects are copied to other nodes. A copy need not wait for the end of a lease. 3. The piece is
   unmounted. A read of it that is under way fails, and the next read finds the copy. Objects without a copy are lost;
   carriers put them again if their hosts have them.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult

from pd_connector.errors import ConfigError
from pd_connector.pool.far.mooncake import MooncakeStore, whole_in_memory
from pd_connector.pool.far.mooncake_client import new_client
from pd_connector.pool.lending.master import DrainJob, LateMasterError, Master, SilentMasterError
from pd_connector.pool.settings import text_of

logger = logging.getLogger("pd_connector.pool.lending")

PIECES = 8
"""A recall takes whole pieces."""
LEAST_PIECE = 64 << 20
_GRAIN = 16 << 20
"""Mooncake rounds segments up to a multiple of this."""
_LOOKS_S = 0.2
_STUCK_S = 3.0
"""After which what a drain job has not moved is copied, in seconds. It is in use: a lease has 10 s, unless the master was told otherwise."""
_DRAIN_SHARE = 0.6
"""Part of the deadline that a drain job has."""
_LEFT_S = 1.0
"""Before the deadline, for unmounting, in seconds."""
_KEYS_AT_ONCE, _COPIES_AT_ONCE = 1000, 64
_DONE, _FAILED = "SUCCESS", "FAILED"
_Answer = TypeVar("_Answer")


class Recalled(NamedTuple):
    """What a recall has done."""

    nbytes: int
    """Memory that is this host's again."""
    moved: int = 0
    copied: int = 0
    lost: int = 0
    """Objects: moved by the drain job, copied because they were in use, and lost."""
    problem: str = ""
    """Why objects were lost, or may have been."""
    is_known: bool = True
    """Whether `lost` is known: only the master knows which objects were in the memory."""


class Piece(NamedTuple):
    """A mounted segment."""

    client: Any
    ids: list[str]
    name: str
    nbytes: int


def piece_bytes(memory: int) -> int:
    """The size of the pieces in which `memory` bytes are lent."""
    return -(-max(memory // PIECES, LEAST_PIECE) // _GRAIN) * _GRAIN


class Lender:
    """Used by one thread, except for `hurry`.

    Attributes:
        recalls: number of recalls so far.
        unknown_recalls: those of them after which the number of lost objects is not known.
        recalled: sum of their results. Any thread may read these three and `nbytes`.

    Args:
        address: address of the store, checked by `far_address`.
        piece: bytes of a piece, from `piece_bytes`.
        deadline_s: the longest wait for one answer of the master.

    Raises:
        ConfigError: the master cannot be reached.
    """

    def __init__(self, address: SplitResult, piece: int, deadline_s: float) -> None:
        self._address, self._piece, self._deadline_s = address, piece, deadline_s
        self._master = Master(address.hostname or "", MooncakeStore.admin_port(address), deadline_s)
        self._master.check()
        self._pieces: list[Piece] = []
        self._hurries = False
        self.recalls, self.unknown_recalls, self.recalled = 0, 0, Recalled(0)

    @property
    def nbytes(self) -> int:
        """Bytes that are lent."""
        return sum(piece.nbytes for piece in self._pieces)

    def hurry(self) -> None:
        """End a recall when it next polls the master; objects that are still in the memory are lost. Can be called from
        a signal handler: it takes no lock."""
        self._hurries = True

    def lend(self, nbytes: int) -> None:
        """Lend whole pieces until `nbytes` are lent, or no further piece fits.

        Raises:
            ConfigError: Mooncake refuses. What was lent before stays lent.
        """
        while self.nbytes + self._piece <= nbytes:
            client = new_client(self._address, self._deadline_s, buffer_bytes=0)
            mounted = client.allocate_and_mount_segment(self._piece)
            if mounted["ret"]:
                client.close()
                raise ConfigError(
                    f"Mooncake answers {mounted['ret']} to a segment of {text_of(self._piece)}: too large for this machine, or the "
                    f"master refuses; {text_of(self.nbytes)} are lent: ask for less (--memory)"
                )
            name, ids = client.get_hostname(), list(mounted["segment_ids"])
            self._pieces.append(Piece(client, ids, name, self._piece))

    def recall(self, nbytes: int, within_s: float) -> Recalled:
        """Recall pieces until `nbytes` or less are lent.

        Args:
            within_s: after this time the memory is taken back, even if objects are still in it.
        """
        keep = nbytes // self._piece
        pieces, until_s = self._pieces[keep:], time.monotonic() + within_s
        if not pieces:
            return Recalled(0)
        moved = copied = lost = 0
        problem, is_known = "", True
        try:
            moved, drained = self._drain(pieces, within_s)
            if not drained:
                copied, lost, problem = self._copy(pieces, until_s)
        except SilentMasterError as error:
            problem, is_known = f"{error}: what was in the memory may be lost", False
        self._pieces = self._pieces[:keep]
        freed, failed = _unmount(pieces, max(_LEFT_S, until_s - time.monotonic()))
        total = self.recalled
        self.recalls += 1
        self.unknown_recalls += not is_known
        self.recalled = Recalled(
            total.nbytes + freed, total.moved + moved, total.copied + copied, total.lost + lost
        )
        problems = "; ".join(filter(None, (problem, failed)))
        return Recalled(freed, moved, copied, lost, problems, is_known)

    def _drain(self, pieces: Sequence[Piece], within_s: float) -> tuple[int, bool]:
        """Have the master move objects to other nodes. Returns the number of moved objects, and whether these were all.
        Raises SilentMasterError."""
        began_s = changed_s = time.monotonic()
        until_s = began_s + within_s - _LEFT_S
        self._answered(self._master.segments, until_s)  # a job must not be begun twice
        number = self._master.start_drain([piece.name for piece in pieces])
        last: DrainJob | None = None
        while True:
            job = self._answered(lambda: self._master.drain(number), until_s)
            now_s = time.monotonic()
            if job.is_over:
                logger.info("drain job: %s", job.message)
                return job.succeeded_units, job.status_name == "SUCCEEDED"
            if last is None or job.active_units or job.succeeded_units != last.succeeded_units:
                changed_s = now_s
            last = job
            if now_s > min(changed_s + _STUCK_S, began_s + within_s * _DRAIN_SHARE):
                return job.succeeded_units, False
            time.sleep(_LOOKS_S)
            if self._hurries:
                return job.succeeded_units, False

    def _answered(self, call: Callable[[], _Answer], until_s: float) -> _Answer:
        """The master's answer to a question. A master that is late is asked again: it may only stand still for a
        moment. Raises SilentMasterError."""
        while True:
            try:
                return call()
            except LateMasterError:
                if self._hurries or time.monotonic() >= until_s:
                    raise

    def _copy(self, pieces: Sequence[Piece], until_s: float) -> tuple[int, int, str]:
        """Copy objects that are only in these pieces. Returns the number of copied objects, the number of failures, and
        the reason. Raises SilentMasterError."""
        client, names = pieces[0].client, {piece.name for piece in pieces}
        segments = self._answered(self._master.segments, until_s - _LEFT_S)
        own = {each.te_endpoint for each in segments if each.segment_name in names}
        room = {
            each.segment_name: each.free_bytes
            for each in segments
            if each.segment_name not in names and each.status == "OK"
        }
        keys = self._answered(self._master.keys, until_s - _LEFT_S)
        left = list(self._only_in(client, own, keys, until_s))
        waiting, tasks = dict(left), dict[str, Any]()
        problem = ""
        while waiting or tasks:
            if self._hurries or time.monotonic() > until_s - _LEFT_S:
                problem = "there was no time to copy them"
                break
            while waiting and len(tasks) < _COPIES_AT_ONCE:
                key, nbytes = waiting.popitem()
                target = max(room, key=lambda name: room[name], default="")
                if not target or room[target] < nbytes:
                    problem = "no other node has room for them"
                    continue
                task, code = client.create_copy_task(key, [target])
                if code:
                    problem = f"the master answers {code} to the copying"
                    continue
                room[target] -= nbytes
                tasks[key] = task
            time.sleep(_LOOKS_S)
            tasks = {key: task for key, task in tasks.items() if not _is_over(client, task)}
        lost = len(list(self._only_in(client, own, [key for key, _ in left], until_s)))
        return len(left) - lost, lost, problem if lost else ""

    def _only_in(
        self, client: Any, own: set[str], keys: Sequence[str], until_s: float
    ) -> Iterator[tuple[str, int]]:
        """Keys and bytes of objects of which no other node has a copy. Raises SilentMasterError."""
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            batch = [key for key in keys[start : start + _KEYS_AT_ONCE] if key]
            copies_of = dict(client.batch_get_replica_desc(batch))
            if missing := [key for key in batch if key not in copies_of]:
                # Gone, or the master stood still: its client says the same. The HTTP server does not.
                self._answered(self._master.segments, until_s)
                copies_of.update(client.batch_get_replica_desc(missing))
            for key, copies in copies_of.items():
                places = whole_in_memory(copies)
                if places and all(place.transport_endpoint in own for place in places):
                    yield key, places[0].size


def _unmount(pieces: Sequence[Piece], within_s: float) -> tuple[int, str]:
    """Unmount all pieces in parallel, because each waits for the master, which may be silent. Returns the bytes freed
    in time, and the errors."""
    answered: list[tuple[int, str]] = []

    def unmount(piece: Piece) -> None:
        problem = ""
        try:
            if code := piece.client.unmount_and_free_segment(piece.ids, 0):
                problem = f"the master answers {code} to the unmounting"
            piece.client.close()
        except Exception as error:
            problem = problem or f"the unmounting fails: {error!r}"
        answered.append((piece.nbytes, problem))

    until_s = time.monotonic() + within_s
    threads = [threading.Thread(target=unmount, args=(each,), daemon=True) for each in pieces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    in_time = answered.copy()
    freed = sum(nbytes for nbytes, _ in in_time)
    if late := sum(piece.nbytes for piece in pieces) - freed:
        return freed, f"the master has not answered yet: {text_of(late)} follow when it does"
    return freed, next((problem for _, problem in in_time if problem), "")


def _is_over(client: Any, task: Any) -> bool:
    answer, code = client.query_task(task)
    return bool(code) or answer.status.name in (_DONE, _FAILED)
