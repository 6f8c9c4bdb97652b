# SPDX-License-Identifier: Apache-2.0
"""The life of a request: from the decision through the streams of its attempts to the client's last token."""
