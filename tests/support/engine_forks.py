# SPDX-License-Identifier: Apache-2.0
"""The process that engines of tests are forks of: it has imported an engine, and waits for calls.

`python engine_forks.py vllm` (or `sglang`) is run by `support.engine_nursery`. Its standard input is a socket. A call says what
to start, or asks how a fork has ended; its answer is a number.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pd_connector.tools.launch.proc import MARKER

MOST_BYTES = 1 << 18
"""Largest message of a call. A socket of packets takes no more by default than 208 KiB."""
MARKER_BYTES = 400
"""Room for the ids of an engine's families. The environment that /proc shows cannot grow."""
SPIN_S = 0.01
"""How long a process of vLLM's looks for a message in a loop. Then it sleeps until it is woken."""
IDLE_MS = 50
"""Longest sleep of an idle scheduler of SGLang. Its saves go on between two of them."""
METRICS_S = 0.1
"""Pause between two updates of an SGLang engine's metrics, which is a second for users: tests wait for counts."""


def vllm_forks() -> None:
    """Let an engine's processes be forks of its first, as on a GPU. vLLM's CPU build starts each as a new
    interpreter, which imports vLLM. With Model Runner V2, steps are scheduled ahead, as on a GPU, too.

    Less waits in loops: a process of an engine with several would look for messages for a second after the last one, on a core
    that others compute on."""
    from torch._dynamo import config as dynamo
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    dynamo.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"  # its import has read another
    SpinCondition.__init__.__defaults__ = (SPIN_S,)
    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_fork(config: Any) -> None:
        ahead = config.use_v2_model_runner and config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = ahead
        config.kernel_config.enable_jit_warmup = False  # kernels are interpreted
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = staticmethod(check_and_fork)
    # It looks at a class of models in a new interpreter, so that this one does not touch a GPU.
    registry._run_in_subprocess = lambda look: look()


def sglang_forks() -> None:
    """Let an engine's scheduler and detokenizer be forks of its first process. SGLang starts each as a new
    interpreter, which imports SGLang.

    Less waits, too: for an engine that is told to end (SGLang looks every five seconds), for what an idle scheduler does besides
    requests (with `--sleep-on-idle` once a second), and for counts."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from pd_connector.sglang import metrics

    configure, end = engine._set_envs_and_config, TokenizerManager.sigterm_watchdog

    def configure_and_fork(server_args: Any) -> None:
        configure(server_args)
        multiprocessing.set_start_method("fork", force=True)

    async def end_soon(manager: Any) -> None:
        while not manager.gracefully_exit:  # noqa: ASYNC110 - SGLang sets it in a signal handler
            await asyncio.sleep(0.1)
        await end(manager)

    def sleep(sleeper: Any) -> None:
        sleeper.poller.poll(IDLE_MS)

    metrics._REFRESH_S = METRICS_S
    IdleSleeper.maybe_sleep = sleep
    engine._set_envs_and_config = configure_and_fork
    TokenizerManager.sigterm_watchdog = end_soon


class Kind(NamedTuple):
    """A kind of engine.

    Attributes:
        server: module that is run.
        imports: modules that its processes would import first.
        prepare: makes the further processes of an engine forks, too.
    """

    server: str
    imports: tuple[str, ...]
    prepare: Callable[[], None]


KINDS = {
    "vllm": Kind(
        "vllm.entrypoints.openai.api_server",
        (
            "vllm.entrypoints.launchers.api_server.entry",
            "vllm.v1.engine.async_llm",
            "vllm.v1.engine.core",
            "vllm.v1.executor.multiproc_executor",
            "vllm.v1.worker.cpu_worker",
            "vllm.model_executor.models.llama",
            "pd_connector.vllm.connector",
        ),
        vllm_forks,
    ),
    "sglang": Kind(
        "sglang.launch_server",
        (
            "sglang.launch_server",
            "sglang.srt.entrypoints.http_server",
            "sglang.srt.managers.scheduler",
            "sglang.srt.models.llama",
            "pd_connector.sglang.plugin",
        ),
        sglang_forks,
    ),
}


def serve(calls: socket.socket) -> dict[str, Any]:
    """Answer calls until there are no more, and end. In a fork, return the call that asked for it."""
    while True:
        message, files, _, _ = socket.recv_fds(calls, MOST_BYTES, 1)
        if not message:
            os._exit(0)
        call = json.loads(message)
        if "ended" in call:
            _, status = os.waitpid(call["ended"], 0)
            answer = os.waitstatus_to_exitcode(status)
        elif (answer := os.fork()) == 0:
            _redirect(files[0])
            return call  # type: ignore[no-any-return]
        else:
            os.close(files[0])
        calls.send(str(answer).encode())


def _redirect(log: int) -> None:
    """Print to the log, and read nothing: standard input was the socket."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, standard in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, standard)
    os.close(nothing)
    os.close(log)


def become(argv: list[str], env: Mapping[str, str], folder: str) -> None:
    """Be what an interpreter is that was started in this folder with these arguments and variables."""
    os.setpgid(0, 0)
    os.chdir(folder)
    _mark(env[MARKER])
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [folder, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[:] = argv


def _mark(families: str) -> None:
    """Write the ids of this process's families to where /proc finds its environment.

    Forks have the variables of the process that was started last by `execve`. A search for members of a family looks
    there.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rsplit(b")", 1)[1].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end, see proc(5)
    name = b"\0" + MARKER.encode() + b"="
    place = start + (b"\0" + ctypes.string_at(start, end - start)).index(name) + len(name) - 1
    value = families.encode()
    if len(value) > MARKER_BYTES:
        raise ValueError(f"ids of families: {len(value)} bytes, at most {MARKER_BYTES} fit")
    ctypes.memmove(place, value.ljust(MARKER_BYTES, b":"), MARKER_BYTES)


def main(kind: Kind) -> None:
    calls = socket.socket(fileno=0)
    for name in kind.imports:
        importlib.import_module(name)
    if threads := len(os.listdir("/proc/self/task")) - 1:
        raise RuntimeError(f"an import has started {threads} threads: a fork would not have them")
    gc.collect()
    gc.freeze()  # so that forks go on sharing this memory
    call = serve(calls)
    calls.detach()
    become([kind.server, *call["argv"]], call["env"], call["folder"])
    kind.prepare()
    runpy.run_module(kind.server, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(KINDS[sys.argv[1]])
