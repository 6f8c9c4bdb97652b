# SPDX-License-Identifier: Apache-2.0
"""What the two sides say to each other, and the two state machines that decide what is said.

- `wire/`: the messages. `producing/` and `consuming/`: the state machines. They do not know each
other.
- Both also use `deadlines`.
"""
