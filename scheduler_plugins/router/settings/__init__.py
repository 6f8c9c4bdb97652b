# SPDX-License-Identifier: Apache-2.0
"""Every setting of the router, the same from a YAML file, and engine names that stand for several."""
