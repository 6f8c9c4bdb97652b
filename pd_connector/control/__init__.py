# SPDX-License-Identifier: Apache-2.0
"""The control channel: its sockets, keys and addresses."""
