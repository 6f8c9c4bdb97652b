# SPDX-License-Identifier: Apache-2.0
"""Agents in these tests, and those in child processes, check their books after every turn."""

import os

os.environ.setdefault("PD_CONNECTOR_CHECK", "1")
