# SPDX-License-Identifier: Apache-2.0
"""Stores of several hosts. `base.py` is the seam; every other store is a file of this package, or another package's."""
