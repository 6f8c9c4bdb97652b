# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.router --prefill URL... --decode URL...`"""

import argparse
import dataclasses
import logging
import os
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler_plugins.qos.trust import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from scheduler_plugins.router.policies.registry import DEFAULT

CLIENT_KEY_VARIABLE = "PD_ROUTER_CLIENT_KEY"
API_KEY_VARIABLE = "PD_ROUTER_API_KEY"

# All other fields of RouterConfig are numbers with defaults. Each becomes an option of the same name.
HELP = {
    "workers": "processes that serve clients, on one port",
    "front_queue": "most requests of each class that wait at the router; 0: all wait at the engines",
    "port": "port to listen on; 0: any free port",
    "first_byte_timeout_s": "longest wait for a stream's first byte",
    "answer_timeout_s": "longest wait for an answer that is not streamed",
    "idle_timeout_s": "longest pause inside an answer, and longest time that a client neither sends nor reads",
    "health_interval_s": "pause between two health checks of one engine",
    "health_timeout_s": "longest wait for an answer of /health",
    "drain_timeout_s": "time that an engine which refuses connections has to finish its requests",
    "attempts": "most engines that may accept one request and fail it",
    "body_mib": "largest request body in MiB",
    "bodies_mib": "most memory of all request bodies together, in MiB",
    "connections": "most client connections",
    "shutdown_timeout_s": "time that running requests have to finish after SIGTERM",
}


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

    parser = _parser(RouterConfig)
    given = vars(parser.parse_args(arguments))
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
        parser.error(str(error))
    try:
        if config.workers > 1:
            from scheduler_plugins.router.workers.keeper import keep

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


def _parser(config: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scheduler_plugins.router",
        description="One OpenAI API in front of prefill and decode engines.",
        epilog=f"Secrets are read from variables: {CLIENT_KEY_VARIABLE} (the key that clients must send), "
        f"{API_KEY_VARIABLE} (--api-key), {ADMIN_KEY_VARIABLE} (the token of the admin API) and {KEY_VARIABLE} "
        "(shared by routers and engines).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for side, which in (
        ("prefill", "the prefill engines"),
        ("decode", "the decode engines"),
        (
            "cpu-prefill",
            "prefill engines without a GPU; --policy length sends them long prompts of classes that are not interactive",
        ),
    ):
        parser.add_argument(
            f"--{side}", nargs="+", action="extend", metavar="URL", help=f"base URLs of {which}"
        )
    parser.add_argument(
        "--kv-events",
        nargs="+",
        action="extend",
        default=[],
        type=_kv_events,
        metavar="URL=EVENTS[,REPLAY]",
        help="endpoints where an engine publishes and replays its KV events (vLLM's --kv-events-config)",
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        action="extend",
        metavar="URL",
        help="base URLs of engines that the router asks for their side",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file with engines, policies and limits; read again when it changes",
    )
    parser.add_argument(
        "--admin-port",
        type=int,
        metavar="N",
        help=f"port of the admin API; its token is printed at the start, or given in {ADMIN_KEY_VARIABLE}",
    )
    parser.add_argument("--admin-host", default="127.0.0.1", help="address of the admin API")
    parser.add_argument(
        "--exchange",
        default="",
        metavar="ADDRESS",
        help="address to publish this router's load to other routers, as tcp://0.0.0.0:9100",
    )
    parser.add_argument(
        "--fellows",
        nargs="+",
        action="extend",
        metavar="ADDRESS",
        help=f"addresses of the other routers' --exchange; all need the same {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--otlp",
        default="",
        metavar="URL",
        help="URL that spans are sent to, as http://127.0.0.1:4318/v1/traces (extra otel)",
    )
    parser.add_argument(
        "--allowed-origins",
        nargs="+",
        action="extend",
        metavar="ORIGIN",
        help="origins of web pages that can use the router from a browser, such as https://chat.example.org; *: all",
    )
    for option, meaning in (
        (
            "--tls-cert",
            "file with the certificate that the router shows to clients",
        ),
        ("--tls-key", "file with the key of --tls-cert; empty: the key is in the same file"),
        ("--engine-ca", "file with the CA certificate for engines with https URLs"),
    ):
        parser.add_argument(option, default="", metavar="FILE", help=meaning)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--policy",
        default=DEFAULT,
        metavar="NAME",
        help="policy that chooses the engines of a request",
    )
    parser.add_argument(
        "--tokenizer",
        default="",
        metavar="FOLDER",
        help="folder with the model's tokenizer.json; empty: the model folder that the engines report",
    )
    parser.add_argument(
        "--profile",
        default="",
        metavar="FILE",
        help="cost model for engines that report none; pd-connector profile writes it",
    )
    parser.add_argument(
        "--decode-policy",
        default="",
        metavar="NAME",
        help="rule that chooses the decode engine; empty: the rule that belongs to --policy",
    )
    parser.add_argument(
        "--api-key",
        default=argparse.SUPPRESS,  # otherwise the help would show the variable's value
        metavar="KEY",
        help=f"key for the router's own requests to the engines; better given in {API_KEY_VARIABLE}",
    )
    parser.add_argument(
        "--log-level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="log level",
    )
    for field in dataclasses.fields(config):
        if field.name in HELP:
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                type=int if field.type in (int, "int") else float,
                default=field.default,
                metavar="N" if field.type in (int, "int") else "SECONDS",
                help=HELP[field.name],
            )
    return parser


def _kv_events(text: str) -> tuple[str, tuple[str, str | None]]:
    """Parse `http://host:8100=tcp://host:5557,tcp://host:5558`: an engine's URL, and the endpoints of its events."""
    url, separator, addresses = text.partition("=")
    events, _, replay = addresses.partition(",")
    if not separator or not events:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must look like http://host:8100=tcp://host:5557,tcp://host:5558"
        )
    return url, (events, replay or None)


if __name__ == "__main__":
    sys.exit(main())
