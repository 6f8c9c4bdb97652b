# SPDX-License-Identifier: Apache-2.0
"""Elastic roles: the task that calls the role policy and carries out its decisions."""
