# SPDX-License-Identifier: Apache-2.0
"""From two geometries to the chunks that pass between them. Pure functions."""
