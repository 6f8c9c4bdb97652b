# SPDX-License-Identifier: Apache-2.0
"""The scheduler's policies beside what engines do by themselves, in simulation or in real engines."""
