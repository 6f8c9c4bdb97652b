# SPDX-License-Identifier: Apache-2.0
"""Quality of service: the classes of users, their shares, and the file that configures them."""
