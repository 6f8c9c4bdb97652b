# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that watch this project's own bars: `python ci/measure --help`, in a clone.

What users measure beside what they have is `pd-connector bench`.
"""
