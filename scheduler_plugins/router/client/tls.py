# SPDX-License-Identifier: Apache-2.0
"""TLS between clients and router, and between router and engines."""

from __future__ import annotations

import ssl

from scheduler_plugins.router.settings.config import RouterConfig


def check(config: RouterConfig) -> None:
    """Raises ValueError for files that cannot be used, and names them."""
    pair = (
        ("tls_cert", "tls_key"),
        for_clients,
        "a certificate in PEM form and its own private key",
    )
    for names, context, content in (
        pair,
        (("engine_ca",), for_engines, "certificates in PEM form"),
    ):
        try:
            context(config)
        except OSError as error:
            files = " and ".join(f"{n} {getattr(config, n)}" for n in names if getattr(config, n))
            text = (
                f"{files}: must be {content}, which this user can read ({error.strerror or error})"
            )
            raise ValueError(text) from None


def for_clients(config: RouterConfig) -> ssl.SSLContext | None:
    """The TLS context for clients; None: plain HTTP. Raises OSError if a file cannot be used."""
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(config.tls_cert, config.tls_key or None)
    return context


def for_engines(config: RouterConfig) -> ssl.SSLContext | bool:
    """The TLS context for engines with `https` URLs. It trusts certificates that `engine_ca` signed; without that
    setting, the system's CAs (True)."""
    return ssl.create_default_context(cafile=config.engine_ca) if config.engine_ca else True
