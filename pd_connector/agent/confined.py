# SPDX-License-Identifier: Apache-2.0
"""An unexpected error ends what it came with, and nothing else."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pd_connector.agent.page_gate import AbandonedError
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.agent")


@contextmanager
def confined(telemetry: Telemetry, what: str, give_up: Callable[[], None]) -> Iterator[None]:
    """Log and count an error of the block, and go on after it.

    Args:
        what: the error ends, for the log: `transfer t`.
        give_up: ends it. What this raises is not caught.

    Raises:
        AbandonedError: the engine has given this agent up; nothing must be done any more.
    """
    try:
        yield
    except AbandonedError:
        raise
    except Exception:
        logger.exception("%s failed", what)
        telemetry.count("session_errors")
        give_up()
