# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that watch this project's own bars: `python ci/measure --help`, in a clone.

Users compare with their own systems through `pd-connector bench`.
"""
