# SPDX-License-Identifier: Apache-2.0
"""The client's side of a request: its connection, who may come in, and the answers it can get."""
