# SPDX-License-Identifier: Apache-2.0
"""The loads of weights in an engine's process, as its door sees them happen.

A connector is made seconds after the weights were loaded. By then a path can lead to another file. So each file that an
engine loads is opened here, too, when the load begins. Later changes of weights in place are reported to listeners.
"""

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

from pd_connector.agent.weights_reader import reading
from pd_connector.kv.checkpoint_files import CheckpointFiles


class Listener(Protocol):
    """Receives events of weights that change in place."""

    def loading(self) -> None:
        """Weights begin to change now."""

    def loaded(self, *, over: bool, whole: bool) -> None:
        """Weights have changed; with `whole` all of them. Without `over` more changes can follow soon."""

    def asleep(self, *, kept: bool) -> None:
        """The engine sleeps: the weights' memory must not be read. With `kept` the weights are the same after
        waking."""

    def awake(self) -> None:
        """The weights' memory can be read again."""


class WeightLoads:
    """Used by the engine's thread.

    Attributes:
        files: checkpoints by the engine's name for them, each in the state of its last load.
        opened: checkpoints that the engine has begun to load since the last change of weights began.
        reads: whether the loading engine uses PDConnector. If so, reading the files starts when their load begins.
    """

    def __init__(self) -> None:
        self.files: dict[Hashable, CheckpointFiles] = {}
        self.opened: list[CheckpointFiles] = []
        self.reads = False
        self._under_way: list[CheckpointFiles] = []
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._depth = 0
        self._session = False  # between the beginning and the end of an update

    def begin(self, place: Hashable, files: CheckpointFiles | None) -> None:
        """The engine is about to load these files."""
        before = self.files.get(place)
        if before in self._under_way:  # looked at again, shortly before it is read
            if files is not None and files.same(before):
                files.close()
                return
            self._under_way.remove(before)
            if before.reader is not None:
                before.reader.stop()
            before.close()
        elif not (before is None or files is None or self._depth or files.same(before)):
            # a second model of the engine, such as an MTP drafter, from the same place
            files.problem = before.problem or "they were replaced between the loads of two models"
        if files is not None:
            self.files[place] = files
            self._under_way.append(files)
            self.opened.append(files)
            if self.reads:
                reading(files)

    def end(self) -> None:
        """The engine has loaded everything that it began to load."""
        for files in self._under_way:
            files.loaded()
        self._under_way.clear()

    def listen(self, listener: Listener) -> None:
        """Report changes to this listener from now on."""
        self._listeners.add(listener)

    def forget(self, listener: Listener) -> None:
        """Report nothing more to this listener."""
        self._listeners.discard(listener)

    @contextmanager
    def change(
        self, *, begins: bool = False, ends: bool = False, whole: bool = False
    ) -> Iterator[None]:
        """A context in which weights change in place.

        Args:
            begins: an update of several parts begins.
            ends: that update ends.
            whole: all weights are loaded.
        """
        self._session |= begins
        if not self._depth:
            self.opened = []
        self._depth += 1
        for listener in list(self._listeners):
            listener.loading()
        try:
            yield
        except BaseException:
            whole = False
            raise
        finally:
            self._depth -= 1
            self._session &= not ends
            if not self._depth:
                self.end()
                for listener in () if self._session else list(self._listeners):
                    listener.loaded(over=whole or ends, whole=whole)

    def sleep(self, *, kept: bool) -> None:
        """The weights lose their memory now. With `kept` they have the same values after `wake`."""
        for listener in list(self._listeners):
            listener.asleep(kept=kept)

    def wake(self) -> None:
        """Weights have memory again."""
        for listener in list(self._listeners):
            listener.awake()
