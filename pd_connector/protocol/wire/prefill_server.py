# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of a vLLM prefill engine, in the form in which a router names it to an SGLang decode engine.

SGLang's own prefill engines have a registry that names their HTTP server. The router writes it into the request's
`custom_params`, which SGLang passes to its scheduler unread. The decode engine needs it only if the prompt must be
computed again.
"""

from typing import Any, NamedTuple
from urllib.parse import urlsplit

_KEY = "pd_prefill_server"


class PrefillServer(NamedTuple):
    """Where to send a prompt that must be computed again.

    Attributes:
        url: base URL of the engine.
        rank: the data-parallel rank that has computed the prompt; None: the engine has one.
    """

    url: str
    rank: int | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port. Raises ValueError if the URL is not `http://host:port`."""
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"{self.url!r}: must be http://host:port")
        return parts.hostname, parts.port or 80

    def params(self) -> dict[str, Any]:
        """The entry in a request's `custom_params`."""
        return {_KEY: {"url": self.url, "rank": self.rank}}


def parse_server(custom_params: object) -> PrefillServer | None:
    """The server that a request's `custom_params` name; None if they name none."""
    named = custom_params.get(_KEY) if isinstance(custom_params, dict) else None
    if not isinstance(named, dict) or not isinstance(named.get("url"), str):
        return None
    rank = named.get("rank")
    return PrefillServer(named["url"], rank if type(rank) is int else None)


def without_server(custom_params: dict[str, Any]) -> dict[str, Any]:
    """`custom_params` without a server: clients are not trusted to name one."""
    return {name: value for name, value in custom_params.items() if name != _KEY}
