# SPDX-License-Identifier: Apache-2.0
"""The description of the model that an engine advertises to its peers, kept true while weights change.

The weights' fingerprint is advertised only after all bytes of their files were read. When weights change in place, it
is withdrawn at once, so no KV passes. After the change the new fingerprint is advertised. It is made from the files if
all weights were loaded from files, otherwise from the parameters in memory.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from pd_connector.agent.commands import ChangeModel, Command, KnowWeights, ReadWeights
from pd_connector.agent.weights_reader import WeightsReader, reading
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts, draft_fingerprint
from pd_connector.kv.weights import combined, tensor_forms

logger = logging.getLogger("pd_connector.agent.advertised_model")


class DraftFiles(NamedTuple):
    """A draft model: the fingerprint of its config, and the files that its weights are loaded from."""

    config: bytes
    files: Sequence[CheckpointFiles]


class _Reading:
    """Several checkpoints that are being read, with a `WeightsReader` each.

    Args:
        ended: called once, when the last reader has ended, from its thread or at once. Never called after `stop`.
        progressed: called with the number of bytes read and the total; with zeros by `stop`.
    """

    def __init__(
        self,
        parts: Iterable[CheckpointFiles],
        ended: Callable[[], None],
        progressed: Callable[[int, int], None],
    ) -> None:
        self._readers: list[WeightsReader] = [reading(part) for part in parts]
        self._all_ended, self._progressed = ended, progressed
        self._left = len(self._readers)
        self._lock = threading.Lock()
        self.over = False
        self._progress()
        for reader in list(self._readers):
            reader.tell(self._progress, self._ended)

    def stop(self) -> None:
        """Stop the readers: their result is not needed any more. After the return no callback is called."""
        with self._lock:
            over, self.over = self.over, True
            if not over:
                self._progressed(0, 0)
        for reader in () if over else self._readers:
            reader.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait until the readers' threads end, each at most `timeout_s` seconds. Returns whether all have ended."""
        return all(reader.join(timeout_s) for reader in self._readers)

    def _progress(self) -> None:
        with self._lock:
            if not self.over:
                self._tell_progress()

    def _tell_progress(self) -> None:
        nbytes = sum(reader.part.nbytes for reader in self._readers)
        self._progressed(sum(reader.read_bytes for reader in self._readers), nbytes)

    def _ended(self) -> None:
        with self._lock:
            self._left -= 1
            if self.over or self._left:
                return
            self._tell_progress()
            self._all_ended()
            self.over = True


class AdvertisedModel:
    """Used by one thread of the engine.

    Args:
        facts: the model as the agent advertises it at its start; with `reading` set if files must be read first.
        files: the files that the weights were loaded from; None if not from files. Closed here after they were read.
        submit: hands a command to the agent.
        draft: the draft model, if its weights are from files.

    Attributes:
        withdrawn: no fingerprint of the weights is advertised now.
        changes: number of changes of the weights and losses of the cache. KV computed before the last one must not be
            used.
        unreadable: the files were replaced after the load, or cannot be read: the caller advertises the parameters in
            memory instead.
    """

    def __init__(
        self,
        facts: ModelFacts,
        files: Sequence[CheckpointFiles] | None,
        submit: Callable[[Command], None],
        draft: DraftFiles | None = None,
    ) -> None:
        self._at_start = self.facts = facts
        self._submit = submit
        self._draft = draft
        self._draft_files: Sequence[CheckpointFiles] = draft.files if draft else ()
        self._files: Sequence[CheckpointFiles] = ()
        self._reading: _Reading | None = None
        self.withdrawn = self.unreadable = False
        self.changes = 0
        if facts.reading:
            self._read(files or ())

    @property
    def reads(self) -> bool:
        """Whether weights are being read. When it turns False, the result has been submitted to the agent."""
        return self._reading is not None and not self._reading.over

    def wait(self) -> None:
        """Wait until all files were read. Their fingerprint has been submitted to the agent then."""
        while self._reading is not None and not self._reading.join(60.0):
            pass

    def facts_now(self) -> ModelFacts:
        """The facts that an agent advertises if it starts now."""
        return self._unknown() if self.withdrawn else self.facts

    def tell_to(self, submit: Callable[[Command], None]) -> None:
        """Submit to a new agent, which replaces the previous one. It started with `facts_now` of that moment."""
        self._submit = submit
        facts = self.facts_now()
        if facts.weights and not facts.reading:
            submit(KnowWeights(facts.weights, facts.draft))

    def withdraw(self) -> None:
        """The weights will change: advertise none until the change is over."""
        if not self.withdrawn:
            logger.warning(
                "weights change while this engine serves: no KV passes until the change is over"
            )
            self.other_weights()
            self._submit(ChangeModel(self._unknown()))

    def other_weights(self) -> None:
        """Withdraw the advertised weights, because others are loaded. The caller advertises the new ones next."""
        self.withdrawn, self.unreadable = True, False
        self.changes += 1
        self.close()

    def pages_lost(self) -> None:
        """The cache has lost its content: earlier KV cannot be used, as after a change of the weights. The advertised weights
        stay."""
        self.changes += 1

    def forget_draft(self) -> None:
        """The draft model's weights may have changed, too: advertise the next weights without it. Call it while weights
        are withdrawn."""
        self._draft = None
        self._at_start = msgspec.structs.replace(self._at_start, draft=b"")

    def tell_files(self, files: Sequence[CheckpointFiles], draft: DraftFiles | None = None) -> bool:
        """Advertise the weights of these files, from which all weights were loaded since `withdraw`, after reading
        them.

        Returns False, and does nothing, if the files may lack a tensor of the previous files: that tensor kept its old
        value.

        Args:
            draft: the files that the draft model was loaded from since `withdraw`. Advertised if they lack no tensor
                either.
        """
        if not _replaces(files, self._files):
            return False
        if draft is not None and _replaces(draft.files, self._draft_files):
            self._draft, self._draft_files = draft, draft.files
        self._change(msgspec.structs.replace(self._at_start, reading=True))
        self._read(files)
        logger.info(
            "the weights were loaded again from files, which are compared once they were read"
        )
        return True

    def tell_memory(self, *, loaded: bytes, version: str = "") -> None:
        """Advertise the parameters in memory, and the operator's name for them. For weights that changed without files,
        or whose files are `unreadable`."""
        facts = self._unknown(loaded=loaded, version=version)
        self._change(msgspec.structs.replace(facts, reading=self._draft is not None))
        if self._draft is not None:
            self._read(())

    def close(self) -> None:
        """Stop the readers. The weights that are being read are not advertised."""
        if self._reading is not None:
            self._reading.stop()

    def _read(self, files: Sequence[CheckpointFiles]) -> None:
        """Read these files and the draft model's, then advertise both."""
        self._files = files or self._files
        draft = self._draft.files if self._draft else ()
        parts = list(dict.fromkeys([*files, *draft]))

        def all_read() -> None:
            self._know(files)
            for part in parts:
                part.close()

        self._reading = _Reading(
            parts, all_read, lambda *nbytes: self._submit(ReadWeights(*nbytes))
        )

    def _know(self, files: Sequence[CheckpointFiles]) -> None:
        """Advertise what was read. Called by a reader's thread after the last file, unless reading was stopped."""
        if self._draft is not None:
            problems = [part.problem for part in self._draft.files if part.problem]
            for problem in problems[:1]:
                logger.warning(
                    "the draft model is not known, so this engine takes no KV: %s", problem
                )
            _forms_known(self._draft.files)
            weights_read = combined([part.weights for part in self._draft.files])
            draft = b"" if problems else draft_fingerprint(self._draft.config, weights_read)
            self._at_start = msgspec.structs.replace(self._at_start, draft=draft)
            self._draft = None
        if problems := [part.problem for part in files if part.problem]:
            logger.warning("the weights are not known by their files: %s", problems[0])
            self.unreadable = True
            self._submit(ReadWeights(0, 0))  # nothing is read any more
            return
        _forms_known(files)  # as long as they are open
        weights = combined([part.weights for part in files]) if files else self.facts.weights
        draft = self._at_start.draft
        self.facts = msgspec.structs.replace(
            self.facts, weights=weights, draft=draft, reading=False
        )
        self._submit(KnowWeights(weights, draft))

    def _unknown(self, *, loaded: bytes = b"", version: str = "") -> ModelFacts:
        """The model without a fingerprint of its files; only with that of the parameters in memory, if given."""
        return msgspec.structs.replace(
            self._at_start,
            weights=b"",
            loaded=loaded,
            updates=self.changes,
            version=version,
            reading=False,
        )

    def _change(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.withdrawn = self.unreadable = False
        self._submit(ChangeModel(facts))


def _replaces(files: Sequence[CheckpointFiles], before: Sequence[CheckpointFiles]) -> bool:
    """Whether the new files have the same tensors as the previous ones, with the same dtypes and shapes."""
    if not before or any(part.problem or part in files for part in before):
        return False
    if not (_forms_known(before) and _forms_known(files)):
        return False
    old, new = [part.forms for part in before], [part.forms for part in files]
    return old == new and all(new)


def _forms_known(parts: Sequence[CheckpointFiles]) -> bool:
    """Read the dtypes and shapes of all tensors (`CheckpointFiles.forms`). Returns whether the files could be read."""
    try:
        for part in parts:
            part.forms = part.forms or tensor_forms(part.files)
    except (OSError, ValueError) as error:  # a safetensors file may be none
        logger.warning("the files of the weights cannot be read: %s", error)
        return False
    return True
