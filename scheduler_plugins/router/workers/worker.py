# SPDX-License-Identifier: Apache-2.0
"""One worker: a whole router in a process that the supervisor has forked."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import replace
from typing import NamedTuple

from scheduler_plugins.router.loop import run
from scheduler_plugins.router.peer_routers.worker_place import WorkerPlace
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import AT_START, SettingsError, SettingsFile

logger = logging.getLogger(__name__)

LISTENING = b"listening"


class Pipes(NamedTuple):
    """A worker's ends of two pipes."""

    supervisor: int
    """Ends when the supervisor does."""
    report: int
    """Takes `LISTENING`, or the reason why the worker cannot serve."""


def work(
    config: RouterConfig, settings: SettingsFile | None, place: WorkerPlace, pipes: Pipes
) -> int:
    """Serve clients until the supervisor ends or sends SIGTERM. Returns the exit status."""
    logging.basicConfig(
        level=logging.getLogger().level,
        format=f"%(asctime)s %(levelname)s [{os.getpid()}] %(message)s",
        force=True,
    )
    try:
        if settings is not None:
            config = _current(config, settings)
        run(_serve(config, settings, place, pipes))
    except OSError as error:
        os.write(pipes.report, str(error).encode())
        logger.error("this worker cannot listen on %s", error)
        return 1
    except Exception as error:
        os.write(pipes.report, repr(error).encode())
        raise
    return 0


def _current(config: RouterConfig, settings: SettingsFile) -> RouterConfig:
    """The settings of the file's present content. Settings that are read only at the router's start
    keep their values."""
    try:
        settings.changed()
    except SettingsError as error:
        logger.error("the changed settings cannot be used, so the old settings stay: %s", error)
    kept = {name: getattr(config, name) for name in (*AT_START, "port", "admin_port", "admin_key")}
    return replace(settings.current, **kept)


async def _serve(
    config: RouterConfig, settings: SettingsFile | None, place: WorkerPlace, pipes: Pipes
) -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    # A terminal sends these to all processes. Only the supervisor acts on them.
    for number in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    loop.add_reader(pipes.supervisor, ended.set)
    async with RouterServer(config, settings, place):
        os.write(pipes.report, LISTENING)
        await ended.wait()
        loop.remove_reader(pipes.supervisor)
