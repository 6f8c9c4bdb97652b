# SPDX-License-Identifier: Apache-2.0
"""Costs of the connector's parts: planning, comparing, resharding, coding, sessions at rest."""
