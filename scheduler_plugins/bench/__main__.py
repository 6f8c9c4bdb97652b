# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.bench`: see `app`."""

from pd_connector.tools.missing import named_if_missing


def main() -> None:
    """Run the command."""
    with named_if_missing():
        from scheduler_plugins.bench.app import app

        app()


if __name__ == "__main__":
    main()
