# SPDX-License-Identifier: Apache-2.0
"""Simulation of one engine: what a policy does to a workload, in seconds instead of hours."""
