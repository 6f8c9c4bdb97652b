# SPDX-License-Identifier: Apache-2.0
"""The tokens of a prompt: by worker processes with the model's tokenizer, or by an engine."""
