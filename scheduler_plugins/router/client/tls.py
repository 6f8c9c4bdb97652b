# SPDX-License-Identifier: Apache-2.0
"""Encryption: of what clients send to the router, and of what the router sends to engines."""

from __future__ import annotations

import ssl

from scheduler_plugins.router.settings.config import RouterConfig


def for_clients(config: RouterConfig) -> ssl.SSLContext | None:
    """What the router shows to clients; None: they speak plain HTTP. Raises OSError: a file cannot be used."""
    if not config.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(config.tls_cert, config.tls_key or None)
    return context


def for_engines(config: RouterConfig) -> ssl.SSLContext | bool:
    """Whom the router believes to be an engine with an `https` URL: who has a certificate that `engine_ca` signed, else one
    that the system trusts."""
    return ssl.create_default_context(cafile=config.engine_ca) if config.engine_ca else True
