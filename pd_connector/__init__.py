# SPDX-License-Identifier: Apache-2.0
"""Prefill/decode disaggregation for existing engines: the data plane.

Importing this package imports no engine and starts nothing.
"""

from pd_connector.config import Config
from pd_connector.errors import Cause, ConfigError, PDConnectorError

__version__ = "0.1.0"

__all__ = ["Cause", "Config", "ConfigError", "PDConnectorError", "__version__"]
