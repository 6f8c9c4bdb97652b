# SPDX-License-Identifier: Apache-2.0
"""Where chunks of the pool are kept. `base.py` is the seam; every other store is a file of this package."""
