# SPDX-License-Identifier: Apache-2.0
"""Scheduling around engines: the prefill/decode router, and the policies it decides by.

Importing this package imports no engine and starts nothing.
"""
