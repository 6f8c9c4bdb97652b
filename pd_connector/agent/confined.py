# SPDX-License-Identifier: Apache-2.0
"""Confines an unexpected error to the session or transfer in which it occurs."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pd_connector.agent.page_gate import AbandonedError
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.agent")


@contextmanager
def confined(telemetry: Telemetry, what: str, give_up: Callable[[], None]) -> Iterator[None]:
    """Log and count an error of the block, and continue after the block.

    Args:
        what: the object that fails, for the log: `transfer t`.
        give_up: ends this object. Its own errors are not caught.

    Raises:
        AbandonedError: the engine has given this agent up, which must do nothing any more.
    """
    try:
        yield
    except AbandonedError:
        raise
    except Exception:
        logger.exception("%s failed", what)
        telemetry.count("session_errors")
        give_up()
