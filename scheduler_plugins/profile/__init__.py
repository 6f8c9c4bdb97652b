# SPDX-License-Identifier: Apache-2.0
"""Measures the cost model of a running engine: `pd-connector profile`."""
