# SPDX-License-Identifier: Apache-2.0
"""Finds the far store of an address, and checks both before anything is dialled."""

import importlib
import ipaddress
import re
import sys
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pd_connector.errors import ConfigError, did_you_mean
from pd_connector.extensions import load_entry_points
from pd_connector.hosts import without_secret
from pd_connector.pool.far.base import FAR_STORE_GROUP, FarStore
from pd_connector.pool.far.environment import CHECKED, problem_there

_BUILT_IN = {
    "redis": "pd_connector.pool.far.redis:RedisStore",
    "rediss": "pd_connector.pool.far.redis:RedisStore",
    "mooncake": "pd_connector.pool.far.mooncake:MooncakeStore",
    "s3": "pd_connector.pool.far.s3:S3Store",
    "lmcache": "pd_connector.pool.far.lmcache:LMCacheStore",
}
"""Imported when an address names them: each imports a client of its own."""
OPTION = "--far"
_NO_PORT = re.compile(r"(?<=://)([^:@/?#\[\]]+):(?!\d+(?:[/?#]|$))[^@/?#]+")
"""What stands in a port's place and is none: a password without `@HOST`."""


def far_class(scheme: str) -> type[FarStore]:
    """The far store of a scheme.

    Raises:
        ConfigError: no package provides one, its package is broken, or its client is not installed.
    """
    if named := _BUILT_IN.get(scheme):
        module, _, attribute = named.partition(":")
        built_in: type[FarStore] = getattr(importlib.import_module(module), attribute)
        return built_in
    added = load_entry_points(FAR_STORE_GROUP).get(scheme)
    if added is None:
        names = sorted({*_BUILT_IN, *load_entry_points(FAR_STORE_GROUP)})
        near = did_you_mean(scheme, names)
        raise ConfigError(
            f"{OPTION}: far store {scheme!r} is not known: {near + ' There' if near else 'there'} are {', '.join(names)}; other "
            f"packages add one by an entry point of group {FAR_STORE_GROUP}"
        )
    store: Any = added.load()
    if isinstance(store, type) and issubclass(store, FarStore):
        return store
    raise ConfigError(
        f"{added.source}: entry point {scheme!r} of group {FAR_STORE_GROUP} is {store!r}: must be a subclass of "
        "pd_connector.pool.far.base.FarStore"
    )


def far_address(text: str, *, sealed: bool, python: str = "") -> tuple[type[FarStore], SplitResult]:
    """Check the address of a far store.

    Args:
        sealed: whether there is a key. Without one only loopback addresses are accepted.
        python: the Python whose environment has the store's client; empty: this one.

    Raises:
        ConfigError: it cannot be used. The text has no password.
    """
    shown = without_secret(text)
    try:
        address = urlsplit(text)
        _ = address.port
    except ValueError:  # its text can have the password
        raise _not_an_address(_NO_PORT.sub(r"\1:***", shown)) from None
    if not address.scheme:
        raise ConfigError(
            f"{OPTION} {shown!r}: must begin with a scheme, such as redis://HOST:6379"
        )
    if "***@" in shown and "@" not in address.netloc:  # a password with /, ? or #
        raise _not_an_address(shown)
    store = far_class(address.scheme)
    if problem := problem_there(python, text) if python else store.problem(address):
        raise ConfigError(f"{OPTION} {shown}: {problem}")
    if not sealed:
        for host in store.hosts(address):
            if not is_loopback(host):
                raise ConfigError(
                    f"{OPTION} {shown}: without a key only this machine's loopback is accepted, not {host!r}: a stranger who writes "
                    "there could change answers. Make a key with `pd-connector key`, keep it in a file of this user alone, "
                    "the same on all hosts, and name it with --key-file"
                )
    return store, address


def _not_an_address(shown: str) -> ConfigError:
    return ConfigError(
        f"{OPTION} {shown}: is not an address such as redis://HOST:6379: a port is a number up to 65535, and : / ? # @ [ ] in a "
        "password are written as %3A %2F %3F %23 %40 %5B %5D"
    )


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can be reached there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _main() -> None:
    """Print the error in the address that is given on standard input. `problem_there` runs this in another Python."""
    address = urlsplit(sys.stdin.read())
    print(CHECKED, far_class(address.scheme).problem(address))


if __name__ == "__main__":
    _main()
