# SPDX-License-Identifier: Apache-2.0
"""What prefill and decode cost: the model, its fit from a profile, and its fit while serving."""
