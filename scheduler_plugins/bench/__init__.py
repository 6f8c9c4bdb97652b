# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the policies: `python -m scheduler_plugins.bench`."""
