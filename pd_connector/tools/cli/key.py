# SPDX-License-Identifier: Apache-2.0
"""`pd-connector key`: make the secret that all engines share."""

from pd_connector.control.keys import new_key


def key() -> None:
    """Print a fresh key, for the variable PD_CONNECTOR_KEY of every engine."""
    print(new_key())
