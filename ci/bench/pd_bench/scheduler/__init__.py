# SPDX-License-Identifier: Apache-2.0
"""The scheduler's policies beside the engines' own policies, in simulation or in real engines."""
