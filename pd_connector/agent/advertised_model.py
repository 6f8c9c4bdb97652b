# SPDX-License-Identifier: Apache-2.0
"""The description of the model that an engine advertises to its peers, kept true while weights change.

At start the engine advertises samples of the weights, and a fingerprint of all bytes when they were read. While weights
change in place it advertises no weights, so that no KV passes. Afterwards it advertises the new weights: by their files, if
all were loaded from files; otherwise by the parameters in memory.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pd_connector.agent.commands import ChangeModel, Command, KnowWeights
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts
from pd_connector.kv.weights import cache_file, full_fingerprint, read_weights

logger = logging.getLogger("pd_connector.agent.advertised_model")


class WeightsReader:
    """Reads all bytes of the loaded weights in a thread, beside the engine's work. The thread starts when this is made.

    Samples are read at once, and let KV pass. They do not show a change of a single row of a table. So all bytes are read
    afterwards, at several GB/s, mostly from the page cache into which the engine has just read them.

    Args:
        parts: the checkpoints of the model, in the order of `kv.weights.read_weights`, which has taken samples of them.
            They are closed when they were read.
        cache: see `full_fingerprint`.
        report: the thread calls it with the fingerprint, unless it was stopped before.
    """

    def __init__(
        self, parts: Sequence[CheckpointFiles], cache: Path | None, report: Callable[[bytes], None]
    ) -> None:
        self._parts = tuple(parts)
        self._cache = cache
        self._report = report
        self._stopped = False
        self._reporting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="pd-weights", daemon=True)
        self._thread.start()

    @property
    def reads(self) -> bool:
        """Whether the fingerprint is still to be reported."""
        return not self._stopped and self._thread.is_alive()

    def stop(self) -> None:
        """The engine does not serve these weights any more. After the return no fingerprint is reported."""
        with self._reporting:
            self._stopped = True

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end, at most `timeout_s` seconds. Returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            full = self._read()
        except (OSError, ValueError) as error:
            logger.warning("weights are compared by samples only: %s", error)
            return
        finally:
            nbytes = sum(file.size for part in self._parts for file in part.files)
            for part in self._parts:
                part.close()
        with self._reporting:
            if self._stopped or not full:
                return
            took_s = time.monotonic() - began
            logger.info(
                "all bytes of the weights are known: %.3g GB in %.3g s", nbytes / 1e9, took_s
            )
            self._report(full)

    def _read(self) -> bytes:
        for part in self._parts:
            assert part.weights is not None, "samples are taken first"
            full = full_fingerprint(part.files, self._cache, lambda: self._stopped)
            if not full:
                return b""
            part.look()
            if part.problem:
                raise ValueError(part.problem)
            part.weights = part.weights._replace(full=full)
        return read_weights(self._parts).full


class AdvertisedModel:
    """Used by one thread of the engine.

    Args:
        facts: advertised when the agent starts.
        files: the files of the weights in `facts`; None if they are not from files. They are closed when all were read.
        submit: submits a command to the agent.

    Attributes:
        withdrawn: no weights are advertised now.
        changes: number of changes of the weights, and of losses of the cache. KV computed before the last one cannot be
            used with the present weights.
    """

    def __init__(
        self,
        facts: ModelFacts,
        files: Sequence[CheckpointFiles] | None,
        submit: Callable[[Command], None],
    ) -> None:
        self._at_start = self.facts = facts
        self._submit = submit
        self._files: Sequence[CheckpointFiles] = ()
        self._reader: WeightsReader | None = None
        self._full = b""  # fingerprint of all bytes; empty until they were read
        self.withdrawn = False
        self.changes = 0
        if files is not None and facts.weights:
            self._read(files)

    @property
    def reads(self) -> bool:
        """Whether all bytes of the weights are being read. When that ends, the fingerprint was submitted."""
        return self._reader is not None and self._reader.reads

    def facts_now(self) -> ModelFacts:
        """The facts that an agent advertises if it starts now."""
        return self._unknown() if self.withdrawn else self.facts

    def tell_to(self, submit: Callable[[Command], None]) -> None:
        """Another agent has replaced the previous one. It has `facts_now`."""
        self._submit = submit
        if (full := self._full) and not self.withdrawn:
            submit(KnowWeights(full))

    def withdraw(self) -> None:
        """The weights will change: advertise none until the change is over."""
        if not self.withdrawn:
            logger.warning(
                "weights change while this engine serves: no KV passes until the change is over"
            )
            self.other_weights()
            self._submit(ChangeModel(self._unknown()))

    def other_weights(self) -> None:
        """The weights are not the advertised ones. The caller advertises the new ones next."""
        self.withdrawn = True
        self.changes += 1
        self.close()
        self._full = b""

    def pages_lost(self) -> None:
        """The cache has lost its content: earlier KV cannot be used, as after a change of the weights. The advertised weights
        stay."""
        self.changes += 1

    def tell_files(self, files: Sequence[CheckpointFiles], *, loaded: bytes) -> bool:
        """Advertise these files: all weights were loaded from them since the last `withdraw`. Returns whether that is
        possible. It is not if the files lack a tensor: that tensor has kept its old values.

        Args:
            loaded: see `ModelFacts`.
        """
        if not self._files or any(part in self._files for part in files):
            return False
        try:
            weights = read_weights(files)
        except (OSError, ValueError) as error:
            logger.warning("weights cannot be hashed: %s", error)
            return False
        if _forms(files) != _forms(self._files):
            return False
        facts = msgspec.structs.replace(
            self._at_start,
            weights=weights.sampled,
            weights_full=weights.full,
            loaded=loaded,
            loaded_full=b"",
        )
        self._change(facts)
        self._read(files)
        logger.info("the weights were loaded again from files, which are compared from now on")
        return True

    def tell_memory(self, *, loaded: bytes, loaded_full: bytes, version: str = "") -> None:
        """The weights have changed: advertise the parameters in memory, and the operator's version of them."""
        self._change(self._unknown(loaded=loaded, loaded_full=loaded_full, version=version))

    def close(self) -> None:
        """Stop the reading. Nothing more is advertised of the present weights."""
        if self._reader is not None:
            self._reader.stop()

    def _read(self, files: Sequence[CheckpointFiles]) -> None:
        """Read all bytes of these files, if only samples of them are known."""
        self._files = files
        if self.facts.weights_full:
            for part in files:
                part.close()
        else:
            self._reader = WeightsReader(files, cache_file(), self._know)

    def _know(self, full: bytes) -> None:
        """All bytes were read. The reader's thread calls it, until it is stopped."""
        self._full = full
        self._submit(KnowWeights(full))

    def _unknown(
        self,
        *,
        loaded: bytes = b"",
        loaded_full: bytes = b"",
        version: str = "",
    ) -> ModelFacts:
        """The model's facts, with no weights but the given fingerprints."""
        return msgspec.structs.replace(
            self._at_start,
            weights=b"",
            weights_full=b"",
            loaded=loaded,
            loaded_full=loaded_full,
            updates=self.changes,
            version=version,
        )

    def _change(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.withdrawn = False
        self._submit(ChangeModel(facts))


def _forms(parts: Sequence[CheckpointFiles]) -> list[bytes]:
    """The forms of all tensors."""
    return [part.weights.forms for part in parts if part.weights is not None]
