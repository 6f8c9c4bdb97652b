# SPDX-License-Identifier: Apache-2.0
"""Turning away what cannot be served in time: the prediction and the decision, without the HTTP."""
