# SPDX-License-Identifier: Apache-2.0
"""Tokenizes prompts: in worker processes with the model's tokenizer, or at an engine."""
