# SPDX-License-Identifier: Apache-2.0
"""`pd-router`: the router, the simulator of a cluster, and an engine to try them with."""

import sys
from collections.abc import Sequence

USAGE = """usage: pd-router COMMAND ...

serve      the router: one OpenAI API in front of prefill and decode engines
simulate   play a recorded trace through a simulated cluster
mock       an engine that speaks vLLM's HTTP and computes nothing

pd-router COMMAND --help tells more."""


INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status. Options without a command are those of `serve`."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(given: list[str]) -> int:
    name = given[0] if given else "--help"
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name == "simulate":
        from scheduler_plugins.sim.command import main as simulate

        return simulate(given[1:])
    if name == "mock":
        from scheduler_plugins.sim.mock.command import main as mock

        return mock(given[1:])
    from scheduler_plugins.router.__main__ import main as serve

    if name != "serve" and not name.startswith("-"):
        print(f"command {name!r} is not known\n{USAGE}", file=sys.stderr)
        return 2
    return serve(given[1:] if name == "serve" else given)


if __name__ == "__main__":
    sys.exit(main())
