# SPDX-License-Identifier: Apache-2.0
"""What peers are told of a model, for as long as that is true.

Samples of the weights are told at start, and all bytes when they were read. When weights change in place, nothing is
told of them from the first moment on, so that no KV passes. What they are is told when they have changed: by files,
where all of them were loaded from files; otherwise by the parameters in memory.
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
    """Starts its thread when made.

    Args:
        parts: the checkpoints that the model consists of, in the order of `kv.weights.read_weights`, which has
            taken samples of them. They are closed when they were read.
        cache: see `full_fingerprint`.
        tell: called with the fingerprint by the thread, unless it was stopped before.
    """

    def __init__(
        self, parts: Sequence[CheckpointFiles], cache: Path | None, tell: Callable[[bytes], None]
    ) -> None:
        self._parts = tuple(parts)
        self._cache = cache
        self._tell = tell
        self._stopped = False
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="pd-weights", daemon=True)
        self._thread.start()

    @property
    def reads(self) -> bool:
        """Whether it has yet to tell what it finds."""
        return not self._stopped and self._thread.is_alive()

    def stop(self) -> None:
        """These weights are not those that the engine serves any more: nothing is told after this."""
        with self._telling:
            self._stopped = True

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; returns whether it has come."""
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
        with self._telling:
            if self._stopped or not full:
                return
            took_s = time.monotonic() - began
            logger.info(
                "all bytes of the weights are known: %.3g GB in %.3g s", nbytes / 1e9, took_s
            )
            self._tell(full)

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
        facts: what peers are told when the agent starts.
        files: what the weights in the facts were read from; None where they are not from files. They are closed
            when all of them were read.
        submit: hands a command to the agent.

    Attributes:
        withdrawn: nothing is told of the weights now.
        changes: how often the weights have changed, or the cache was lost. KV that was computed before is none of the
            present weights'.
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
        self._full = b""  # fingerprint of all bytes, once they were read
        self.withdrawn = False
        self.changes = 0
        if files is not None and facts.weights:
            self._read(files)

    @property
    def reads(self) -> bool:
        """Whether all bytes of the weights are being read. Once they are not, what was read has been told."""
        return self._reader is not None and self._reader.reads

    def facts_now(self) -> ModelFacts:
        """What an agent that starts now tells its peers."""
        return self._unknown() if self.withdrawn else self.facts

    def tell_to(self, submit: Callable[[Command], None]) -> None:
        """Another agent has taken the place of the one before. It knows `facts_now`."""
        self._submit = submit
        if (full := self._full) and not self.withdrawn:
            submit(KnowWeights(full))

    def withdraw(self) -> None:
        """The weights will not be those that peers were told of."""
        if not self.withdrawn:
            logger.warning(
                "weights change while this engine serves: no KV passes until the change is over"
            )
            self.other_weights()
            self._submit(ChangeModel(self._unknown()))

    def other_weights(self) -> None:
        """The weights are not those that peers were told of; what they are is told next."""
        self.withdrawn = True
        self.changes += 1
        self.close()
        self._full = b""

    def pages_lost(self) -> None:
        """The cache has lost its content: what was computed before is gone as it is when weights change. The weights that
        peers were told of stand."""
        self.changes += 1

    def tell_files(self, files: Sequence[CheckpointFiles], *, loaded: bytes) -> bool:
        """All weights were loaded from these files since they were withdrawn. Returns whether they are told. They
        are not told if the files lack a tensor, because that tensor stayed as it was.

        Args:
            loaded: as in `ModelFacts`.
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
        """The weights have changed: tell the parameters in memory, and what the operator calls them."""
        self._change(self._unknown(loaded=loaded, loaded_full=loaded_full, version=version))

    def close(self) -> None:
        """Nothing more is told of the weights that were told last."""
        if self._reader is not None:
            self._reader.stop()

    def _read(self, files: Sequence[CheckpointFiles]) -> None:
        """These files are known by samples: read all of them, if they were not."""
        self._files = files
        if self.facts.weights_full:
            for part in files:
                part.close()
        else:
            self._reader = WeightsReader(files, cache_file(), self._know)

    def _know(self, full: bytes) -> None:
        """All bytes were read: called by the reader's thread, until it is stopped."""
        self._full = full
        self._submit(KnowWeights(full))

    def _unknown(
        self,
        *,
        loaded: bytes = b"",
        loaded_full: bytes = b"",
        version: str = "",
    ) -> ModelFacts:
        """The model, with nothing known of its weights but the given fingerprints."""
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
