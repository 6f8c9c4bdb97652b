# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.router --prefill URL... --decode URL...`: the command `pd-router serve`."""

import logging
import os
import sys
from collections.abc import Sequence
from inspect import Parameter
from typing import Any

import typer

from pd_connector.tools.command_line import run as run_command
from pd_connector.tools.command_line import single
from scheduler_plugins.qos.trust import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from scheduler_plugins.router.client.tls import check as check_tls
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.options import (
    API_KEY_VARIABLE,
    CLIENT_KEY_VARIABLE,
    SECRETS,
    kv_events,
    parameters,
)
from scheduler_plugins.router.settings.settings_file import SettingsFile

FAILED = 1


def serve(ctx: typer.Context, **given: Any) -> None:
    level, path = given.pop("log_level"), given.pop("config")
    logging.basicConfig(level=level.value, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config, settings = _settings(given, path)
        check_tls(config)
    except ValueError as error:
        ctx.fail(str(error))
    try:
        _run(config, settings)
    except OSError as error:
        _fail(f"cannot listen on {error}")


serve.__doc__ = f"""The router: one OpenAI API in front of prefill and decode engines.

{SECRETS}
"""


def _settings(given: dict[str, Any], path: Any) -> tuple[RouterConfig, SettingsFile | None]:
    """The settings, and their file if there is one. Raises ValueError: they cannot be used."""
    options = {name: value for name, value in given.items() if value not in (None, [])}
    options["kv_events"] = dict(map(kv_events, given["kv_events"] or ()))
    options.setdefault("api_key", os.environ.get(API_KEY_VARIABLE, ""))
    options["admin_key"] = os.environ.get(ADMIN_KEY_VARIABLE, "")
    options["client_key"] = os.environ.get(CLIENT_KEY_VARIABLE, "")
    options["router_key"] = os.environ.get(KEY_VARIABLE, "")
    if path:
        settings = SettingsFile(path, options)
        return settings.current, settings
    return RouterConfig(**options).checked_here(), None


def _run(config: RouterConfig, settings: SettingsFile | None) -> None:
    from scheduler_plugins.router.loop import run
    from scheduler_plugins.router.server import serve as serve_clients

    if config.workers > 1:
        from scheduler_plugins.router.workers.supervisor import supervise

        supervise(config, settings)
    else:
        run(serve_clients(config, settings))


def _fail(reason: str) -> None:
    print(reason, file=sys.stderr)
    raise typer.Exit(FAILED)


app = single(
    serve,
    [
        Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *parameters(RouterConfig),
    ],
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the router until SIGINT, SIGTERM or SIGHUP. Returns the exit status."""
    return run_command(app, "pd-router serve", arguments)


if __name__ == "__main__":
    sys.exit(main())
