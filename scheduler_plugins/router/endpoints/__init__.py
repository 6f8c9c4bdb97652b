# SPDX-License-Identifier: Apache-2.0
"""The HTTP endpoints: the OpenAI API, the live page, and the admin API."""
