# SPDX-License-Identifier: Apache-2.0
"""Engines in the pods of a Kubernetes cluster: `api` asks the API server, `pods` follows the pods of one name."""
