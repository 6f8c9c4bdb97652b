# SPDX-License-Identifier: Apache-2.0
"""The processes that run `token_worker`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

from scheduler_plugins.router.tokens.token_worker import (
    Examined,
    TokenizerError,
    begin,
    examine,
    files_digest,
    tokenize,
)

logger = logging.getLogger(__name__)

WORKERS = 2
LIMIT_S = 2.0
"""Longest wait for the tokens of one prompt. After that, the prompt is sent without them."""
LOADING_S = 60.0
"""Longest wait until a tokenizer is loaded and tried on its whole vocabulary."""
_T = TypeVar("_T")


class _Process:
    """One worker process. It starts with the first task."""

    def __init__(self) -> None:
        self.open_tasks = 0
        """Number of open tasks."""
        self._executor: ProcessPoolExecutor | None = None

    async def do(self, limit_s: float, work: Callable[..., _T], *given: Any) -> _T:
        """Run `work` in the process. Raises the errors of `work`, BrokenExecutor, or
        TimeoutError."""
        executor = self._executor
        if executor is None:
            context = get_context("spawn")
            executor = self._executor = ProcessPoolExecutor(1, context, initializer=begin)
        self.open_tasks += 1
        try:
            async with asyncio.timeout(limit_s):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(executor, work, *given)
        except BrokenExecutor:
            if self._executor is executor:  # else another task knew first, and began a new one
                self._executor = None
            raise
        finally:
            self.open_tasks -= 1

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


class WorkerPool:
    """A few processes. All load the tokenizer before any is asked for tokens."""

    def __init__(self) -> None:
        self._processes = [_Process() for _ in range(WORKERS)]

    async def tokens(self, folder: str, digest: str, body: Mapping[str, Any]) -> bytes | None:
        """See `token_worker.tokenize`. None after any failure."""
        process = min(self._processes, key=lambda candidate: candidate.open_tasks)
        try:
            return await process.do(LIMIT_S, tokenize, folder, digest, dict(body))
        except TokenizerError as error:
            logger.info("%s", error)
        except BrokenExecutor as error:
            logger.warning("a worker process that tokenizes has ended: %s", error)
        except TimeoutError:
            logger.warning("a prompt was not tokenized within %g s", LIMIT_S)
        except Exception as error:
            # The tokenizer gets arbitrary input from clients, so it can raise any error.
            logger.info("a prompt cannot be tokenized here: %s", error)
        return None

    async def digest(self, folder: str) -> str:
        """See `token_worker.files_digest`. Raises TokenizerError."""
        return await self._run(self._processes[0], files_digest, folder)

    async def examined(self, folder: str) -> Examined:
        """See `token_worker.examine`. Raises TokenizerError."""
        first, *others = self._processes
        examined = await self._run(first, examine, folder)
        sample: dict[str, Any] = {"prompt": ""}
        await asyncio.gather(
            *(self._run(process, tokenize, folder, examined.digest, sample) for process in others)
        )
        return examined

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    async def _run(
        self, process: _Process, question: Callable[..., _T], folder: str, *given: Any
    ) -> _T:
        try:
            return await process.do(LOADING_S, question, folder, *given)
        except TimeoutError:
            problem = f"its tokenizer was not loaded within {LOADING_S:g} s"
        except BrokenExecutor as error:
            problem = f"the process that loads its tokenizer has ended: {error}"
        raise TokenizerError(f"{folder}: {problem}")
