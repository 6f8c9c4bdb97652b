# SPDX-License-Identifier: Apache-2.0
"""The cost of prefill and decode: the model, its fit from a profile, and its fit while serving."""
