# SPDX-License-Identifier: Apache-2.0
"""The operator's token. The admin API requires it, and the live page reserves places for it.

`PD_ROUTER_ADMIN_KEY` sets the token. Otherwise the router makes a new token at each start, logs it, and keeps it in a
file that only the router's user can read.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from aiohttp import web

from scheduler_plugins.router.settings.config import RouterConfig

logger = logging.getLogger(__name__)


class AdminAuth:
    """Recognizes the operator of this router by a token."""

    def __init__(self, key: str) -> None:
        """`key`: `PD_ROUTER_ADMIN_KEY`; empty: a new token is made."""
        self.token = key or secrets.token_urlsafe(32)
        self._made = not key

    def sent(self, request: web.Request) -> bool:
        """Whether the request carries the token (`Authorization: Bearer`)."""
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        expected = f"Bearer {self.token}".encode()
        return compare_digest(sha256(given).digest(), sha256(expected).digest())

    @contextmanager
    def published(self, config: RouterConfig, port: int) -> Iterator[None]:
        """Publish a token that was made here: in the log, and in `token_file(port)` during the block."""
        if not self._made:
            yield
            return
        path = token_file(port)
        try:
            _write(path, self.token)
            where = f"kept in {path}"
        except OSError as error:
            where = f"kept in no file: {error}"
        scheme = "https" if config.tls_cert else "http"
        logger.info(
            "Live page: %s://%s/#token=%s", scheme, authority(config.host, port), self.token
        )
        if config.admin_port is not None:
            logger.info("Token of the admin API: %s (%s)", self.token, where)
        try:
            yield
        finally:
            with suppress(OSError):
                if path.read_text() == self.token:  # another router may use the port by now
                    path.unlink()


def token_file(port: int) -> Path:
    """The file with the token of the router on `port`."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "pd-router" / f"{port}.token"


def authority(host: str, port: int) -> str:
    """Host and port in the form of a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _write(path: Path, token: str) -> None:
    """Write the file so that no other user can read it at any moment. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    written = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(written, "w") as file:
            file.write(token)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
