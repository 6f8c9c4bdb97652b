# SPDX-License-Identifier: Apache-2.0
"""The client's side of a request: its connection, its access, and the router's own answers."""
