# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) by content: for peers, and for vLLM's own prefix cache.

vLLM keys the pages of its prefix cache by an adapter's name and path. If another adapter is loaded under the same name
and path, it would find the earlier adapter's pages, and hand them over as its own. So pages are keyed by content, too.
The same holds for tiers of other connectors, which use vLLM's block hashes.

A request keeps the adapter's content as it was when the request came. Its KV is handed over only if the files are
untouched at its end: vLLM rereads an adapter that it had evicted, also while a request for it runs.

vLLM identifies adapters by number, and an adapter that is replaced in place keeps its number. Each step loads one
adapter for a number: that of the request that joined the batch first, or last (vLLM's two model runners differ). So a
request that comes while requests of the replaced adapter are here may be computed with either.
"""

import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pd_connector.kv.checkpoint_files import FileState, links
from pd_connector.kv.identity import adapter_files, adapter_fingerprint
from pd_connector.vllm.identity.config_files import in_cache

if TYPE_CHECKING:
    from vllm.v1.request import Request


class AdapterFiles(NamedTuple):
    """An adapter's files as they were read."""

    fingerprint: str
    folder: Path
    states: dict[Path, FileState]  # and of the links that lead to them


class LoadedAdapter(NamedTuple):
    """An adapter that a client had vLLM load."""

    path: str
    files: AdapterFiles | None  # None where they could not be read
    problem: str = ""  # why its content is not known
    reading: int = 0  # a new number whenever its files may have changed


def number_and_path(lora: Any) -> tuple[int, str]:
    """vLLM's number of an adapter, and the folder or repository that vLLM reads it from."""
    return int(lora.lora_int_id), str(lora.lora_path)


def loads_in_place(lora: Any) -> bool:
    """Whether vLLM rereads an adapter's files for every step that needs it."""
    return bool(getattr(lora, "load_inplace", False))


def read_adapter(path: str) -> LoadedAdapter:
    """An adapter as its files are now; with `problem` if they cannot be read."""
    try:
        return LoadedAdapter(path, read_files(path))
    except OSError as error:
        return LoadedAdapter(path, None, str(error))


def read_files(path: str) -> AdapterFiles:
    """Read an adapter's files. Raises OSError if there are no adapter weights, or they cannot be read."""
    folder = _folder(path)
    states = _states(folder)
    files = AdapterFiles(adapter_fingerprint(folder), folder, states)
    if _states(folder) != states:
        raise OSError(f"{path} has changed while it was read; load the adapter again")
    return files


def _folder(path: str) -> Path:
    """The folder from which vLLM would read an adapter now."""
    local = Path(os.path.expanduser(path))  # Path's own raises if the user does not exist
    return local if local.is_dir() else in_cache(path, None) or local


def _states(folder: Path) -> dict[Path, FileState]:
    """States of an adapter's files, and of the links that lead to them: a link may be switched to another adapter and
    back while vLLM reads. Raises OSError if there are no weights of an adapter."""
    states: dict[Path, FileState] = {}
    for file in adapter_files(folder):
        states |= links(file)
        states[file] = FileState.of(file.stat())
    return states


def untouched(loaded: LoadedAdapter) -> bool:
    """Whether the files still have the content that was loaded. Removed files count as untouched: vLLM cannot reread them."""
    if loaded.files is None or _folder(loaded.path) != loaded.files.folder:
        return False
    try:
        return _states(loaded.files.folder) == loaded.files.states
    except OSError:
        return True


logger = logging.getLogger("pd_connector.vllm")

_USES = "_pd_connector_adapters"
_SEEN_S = 0.05
"""How long `Adapters.replaced` relies on its last look at an adapter's files, in seconds. A look takes up to 0.5 ms, and vLLM asks
in every step for every request that waits."""


@dataclass(frozen=True, eq=False)
class _Use:
    """The adapter of one request, as it was when the request came."""

    name: str  # name and content
    content: str
    pages: str  # key of its pages, beside the adapter's name and path
    problem: str
    reading: int


class Adapters:
    """The known adapters of an engine. Can be used by any thread.

    Attributes:
        problem: why no adapter is trusted; usually empty.

    Args:
        settings: the engine's settings for adapters (`inputs.adapter_settings`).
    """

    def __init__(self, settings: str = "") -> None:
        self.problem = ""
        self._settings = settings
        self._loaded: dict[int, LoadedAdapter] = {}  # by vLLM's number
        self._doubts: dict[str, int] = {}  # by fingerprint: how often its pages may have changed
        # Requests that are here, by number and path.
        self._live: dict[int, dict[str, weakref.WeakSet[_Use]]] = {}
        self._readings = 0
        self._seen: dict[int, float] = {}  # by number: when its files were looked at
        self._lock = threading.Lock()

    def name(self, request: "Request") -> str:
        """Name and content of a request's adapter; empty for none.

        Raises:
            OSError: the content is not known.
        """
        if not request.lora_request:
            return ""
        use = self._use(request)
        if use.problem:
            raise OSError(use.problem)
        return use.name

    def content(self, request: "Request") -> str:
        """Content of a request's adapter, without its name; empty for none.

        Raises:
            OSError: the content is not known.
        """
        return self._use(request).content if self.name(request) else ""

    def pages(self, request: "Request") -> str:
        """The key of a request's pages, beside the name and the path of its adapter."""
        return self._use(request).pages

    def unchanged(self, request: "Request") -> bool:
        """Whether all KV of a request was computed with the adapter that `name` returned."""
        return not request.lora_request or (
            not self._use(request).problem and not self.replaced(request)
        )

    def replaced(self, request: "Request", *, look: bool = True) -> bool:
        """Whether vLLM may now have another adapter than when the request came. Works for adapters without a known
        content, too.

        Args:
            look: whether to check the files now. Otherwise a check from a moment ago is enough; a load or removal
                counts at once.
        """
        if not request.lora_request:
            return False
        use, lora = self._use(request), request.lora_request
        number, path = number_and_path(lora)
        with self._lock:
            loaded = self._loaded.get(number)
            if loaded is None or loaded.path != path:
                return True
            if look or time.monotonic() >= self._seen.get(number, 0.0) + _SEEN_S:
                loaded = self._refresh(number, loaded, in_place=loads_in_place(lora))
        return loaded.reading != use.reading

    def finished(self, request: "Request") -> None:
        """A request has ended: no step loads its adapter any more."""
        if not request.lora_request:
            return
        use, (number, path) = self._use(request), number_and_path(request.lora_request)
        with self._lock:
            live = self._live.get(number, {})
            live.get(path, weakref.WeakSet()).discard(use)
            if not any(live.values()):
                self._live.pop(number, None)

    def before_load(self, lora: Any) -> AdapterFiles | None:
        """vLLM is about to load an adapter. Returns its files for `load`; None if they are not on this disk."""
        number, path = number_and_path(lora)
        if number in self._loaded and not loads_in_place(lora):
            return None  # vLLM has it already
        try:
            return read_files(path)
        except OSError as error:
            logger.debug("adapter %s cannot be read before it is loaded: %r", lora, error)
            return None

    def load(self, lora: Any, before: AdapterFiles | None) -> None:
        """vLLM has loaded an adapter.

        Args:
            before: its files before the load. If they lie in another folder now, vLLM has downloaded them.
        """
        number, path = number_and_path(lora)
        with self._lock:
            for other, there in list(self._loaded.items()):
                if there.path == path:
                    self._refresh(other, there)
            replaced = self._loaded.get(number)
            if replaced is not None and not loads_in_place(lora):
                return  # vLLM had it already
            if replaced is not None and replaced.files is not None:
                self._doubt(replaced.files)
            loaded = read_adapter(path)
            files = loaded.files
            if before and files and files.folder == before.folder and files != before:
                loaded = loaded._replace(
                    problem=f"{path} has changed during its load; load it again"
                )
            self._note(number, loaded)

    def load_failed(self, lora: Any) -> None:
        """vLLM could not load an adapter, but some ranks may have loaded it. If it should have replaced another
        adapter, neither is trusted."""
        number, path = number_and_path(lora)
        with self._lock:
            if loaded := self._loaded.get(number):
                problem = f"its load from {path} has failed; load it again"
                self._replaced(number, loaded, problem)

    def remove(self, number: int) -> None:
        """vLLM has removed an adapter; its number may be given to another one."""
        with self._lock:
            removed = self._loaded.pop(number, None)
            if removed is not None and removed.files is not None:
                self._doubt(removed.files)

    def _use(self, request: "Request") -> _Use:
        uses = vars(request).setdefault(_USES, {})
        if self not in uses:
            lora = request.lora_request
            number, path = number_and_path(lora)
            with self._lock:
                live = self._live.setdefault(number, {})
                replaced = any(uses for other, uses in live.items() if other != path)
                uses[self] = self._begin(lora, replaced=replaced)
                live.setdefault(path, weakref.WeakSet()).add(uses[self])
        return uses[self]  # type: ignore[no-any-return]

    def _begin(self, lora: Any, *, replaced: bool) -> _Use:
        """Note the adapter of a new request.

        Args:
            replaced: whether requests still run for the adapter that had this number before.
        """
        number, _ = number_and_path(lora)
        loaded = self._look(lora)
        problem = loaded.problem or self.problem
        if replaced:
            loaded = self._note(number, loaded)  # its pages are its own
            problem = problem or f"requests of the adapter that {lora.lora_name} replaces still run"
        if problem or loaded.files is None:
            pages = f"unknown {number}.{loaded.reading}"
            return _Use("", "", pages, problem, loaded.reading)
        content = loaded.files.fingerprint
        layout = "3d" if getattr(lora, "is_3d_lora_weight", False) else ""
        described = " ".join(part for part in (content, layout, self._settings) if part)
        pages = f"{described}.{self._doubts.get(content, 0)}"
        return _Use(f"{lora.lora_name} {described}", described, pages, "", loaded.reading)

    def _look(self, lora: Any) -> LoadedAdapter:
        """An adapter as it is now."""
        (number, path), in_place = number_and_path(lora), loads_in_place(lora)
        loaded = self._loaded.get(number)
        if loaded is None or (in_place and (loaded.path != path or loaded.problem)):
            return self._note(number, read_adapter(path))
        if loaded.path != path:
            problem = (
                f"adapter {number} is loaded from {loaded.path}: {path} needs a number of its own"
            )
            return self._replaced(number, loaded, problem)
        return self._refresh(number, loaded, in_place=in_place)

    def _replaced(self, number: int, loaded: LoadedAdapter, problem: str) -> LoadedAdapter:
        """vLLM may have another adapter under this number now, or later."""
        if loaded.files is not None:
            self._doubt(loaded.files)
        return self._note(number, loaded._replace(problem=problem))

    def _refresh(
        self, number: int, before: LoadedAdapter, *, in_place: bool = False
    ) -> LoadedAdapter:
        """Check whether the files of an adapter are untouched. If not, its pages may hold KV of either content, and
        are no longer found.

        Args:
            in_place: vLLM rereads the files for every step, and so has their present content.
        """
        self._seen[number] = time.monotonic()
        if before.problem or untouched(before):
            return before
        loaded = read_adapter(before.path)
        if before.files is not None:
            self._doubt(before.files)
            same = loaded.files is not None and loaded.files.fingerprint == before.files.fingerprint
            if not same and not in_place:
                changed = f"{before.path} has changed since the adapter was loaded; unload the adapter, and load it again"
                loaded = loaded._replace(problem=changed)
        return self._note(number, loaded)

    def _note(self, number: int, loaded: LoadedAdapter) -> LoadedAdapter:
        self._readings += 1
        self._loaded[number] = loaded._replace(reading=self._readings)
        return self._loaded[number]

    def _doubt(self, files: AdapterFiles) -> None:
        self._doubts[files.fingerprint] = self._doubts.get(files.fingerprint, 0) + 1
