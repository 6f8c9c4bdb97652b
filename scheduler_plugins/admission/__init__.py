# SPDX-License-Identifier: Apache-2.0
"""Refusing requests that cannot be served in time: the prediction and the decision, without HTTP."""
