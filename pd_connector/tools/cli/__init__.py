# SPDX-License-Identifier: Apache-2.0
"""The `pd-connector` command: `demo`, `doctor`, `bench`, `key`."""
