# SPDX-License-Identifier: Apache-2.0
"""Every setting of the router, its YAML file, and names that stand for several engines."""
