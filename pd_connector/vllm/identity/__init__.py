# SPDX-License-Identifier: Apache-2.0
"""What KV depends on: the model as it is loaded, adapters, images."""
