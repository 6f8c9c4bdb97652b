# SPDX-License-Identifier: Apache-2.0
"""The HTTP server's log of invalid requests."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log, without a traceback for each invalid request. Any client could fill the disk with tracebacks,
    and they would look like failures of the router. The client gets the error."""

    def __init__(self) -> None:
        super().__init__(server_logger)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        if isinstance(exc_info, HttpProcessingError | web.RequestPayloadError):
            first_line = " ".join(str(exc_info).split())[:200]
            self.debug(f"{msg}: %s", *args, first_line)
        else:
            super().exception(msg, *args, exc_info=exc_info, **more)
