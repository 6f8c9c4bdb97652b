# SPDX-License-Identifier: Apache-2.0
"""The door to SGLang. Engine types stay inside; nothing else in the package imports SGLang."""
