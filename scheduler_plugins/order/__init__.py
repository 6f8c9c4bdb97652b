# SPDX-License-Identifier: Apache-2.0
"""Orders of the waiting queue, one class each; `registry` names them."""
