# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.router --prefill URL... --decode URL...`"""

import logging
import os
import ssl
import sys
from collections.abc import Sequence

from scheduler_plugins.qos.trust import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from scheduler_plugins.router.settings.options import (
    API_KEY_VARIABLE,
    CLIENT_KEY_VARIABLE,
    parser,
)

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the router until SIGINT or SIGTERM. Returns the exit status."""
    try:
        return _serve(arguments)
    except KeyboardInterrupt:  # during the start, before signal handlers are set
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _serve(arguments: Sequence[str] | None) -> int:
    try:
        from scheduler_plugins.router.loop import run
        from scheduler_plugins.router.server import serve
        from scheduler_plugins.router.settings.config import RouterConfig
        from scheduler_plugins.router.settings.settings_file import SettingsFile
    except ModuleNotFoundError as error:
        print(f"{error}: pip install 'pd-connector[router]'", file=sys.stderr)
        return 2

    options = parser(RouterConfig)
    given = vars(options.parse_args(arguments))
    given.setdefault("api_key", os.environ.get(API_KEY_VARIABLE))
    level = given.pop("log_level")
    given["kv_events"] = dict(given["kv_events"])
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    path = given.pop("config")
    wanted = {name: value for name, value in given.items() if value is not None}
    wanted["admin_key"] = os.environ.get(ADMIN_KEY_VARIABLE, "")
    wanted["client_key"] = os.environ.get(CLIENT_KEY_VARIABLE, "")
    wanted["router_key"] = os.environ.get(KEY_VARIABLE, "")
    try:
        settings = SettingsFile(path, wanted) if path else None
        config = settings.current if settings else RouterConfig(**wanted)
    except ValueError as error:
        options.error(str(error))
    try:
        if config.workers > 1:
            from scheduler_plugins.router.workers.keep import keep

            run(keep(config, settings))
        else:
            run(serve(config, settings))
    except ssl.SSLError as error:
        print(f"tls_cert, tls_key or engine_ca cannot be used: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cannot listen on {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
