# SPDX-License-Identifier: Apache-2.0
"""Elastic roles: the task that asks the role policy, and has its decisions carried out."""
