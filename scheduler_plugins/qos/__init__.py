# SPDX-License-Identifier: Apache-2.0
"""Quality of service: the classes of users, what each is owed, and the file that says so."""
