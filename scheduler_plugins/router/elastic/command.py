# SPDX-License-Identifier: Apache-2.0
"""Runs a user's command without a shell and with a deadline; ends all of its processes when the deadline has passed."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from scheduler_plugins.qos.trust import ADMIN_KEY_VARIABLE
from scheduler_plugins.router.settings.options import API_KEY_VARIABLE, CLIENT_KEY_VARIABLE

MOST_BYTES = 64 << 10
"""The end of a command's output that is read."""
TERM_S = 2.0
"""Time between SIGTERM and SIGKILL."""
_SECRETS = (ADMIN_KEY_VARIABLE, CLIENT_KEY_VARIABLE, API_KEY_VARIABLE)
"""Variables of the router that a command does not get."""


class CommandError(Exception):
    """A command failed; the message says how, and what it printed last."""


async def output_of(
    setting: str, arguments: Sequence[str], variables: Mapping[str, str], timeout_s: float
) -> str:
    """A command's standard output. The command must end within `timeout_s`. Its background processes can go on, and can
    keep the output open.

    Args:
        setting: the name of the command's setting, for messages.
        variables: added to the router's own environment, which is passed on without the keys of clients and operators.

    Raises:
        CommandError: it cannot be started, did not end in time, or ended with a status other than 0.
        OSError: there is no room for its output in the folder of temporary files.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    # Files and not pipes: an engine that inherits a pipe would keep the router waiting for its end.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**environment, **variables},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise CommandError(f"{setting} cannot be run: {why}: {arguments[0]!r}") from None
        try:
            async with asyncio.timeout(timeout_s):
                status = await process.wait()
        except TimeoutError:
            await _end(process)
            raise CommandError(
                f"{setting} had not ended after {timeout_s:g} s, and was killed{_last(err)}; it must start or stop the "
                "engine in the background, and end"
            ) from None
        except asyncio.CancelledError:
            await _end(process)
            raise
        if status:
            how = f"status {status}" if status > 0 else f"signal {-status}"
            raise CommandError(f"{setting} ended with {how}{_last(err)}")
        return _tail(out)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command with all that it has started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(
            ProcessLookupError, PermissionError
        ):  # no permission: it runs as another user
            os.killpg(process.pid, how)
        with suppress(TimeoutError):
            async with asyncio.timeout(TERM_S):
                await process.wait()
    # A child can outlive the leader that SIGTERM has ended.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MOST_BYTES))
    return file.read(MOST_BYTES).decode(errors="replace")


def _last(file: IO[bytes]) -> str:
    """The last line of what it said, for a message."""
    lines = _tail(file).split("\n")
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({''.join(c if c.isprintable() else '?' for c in line[:300])})" if line else ""
