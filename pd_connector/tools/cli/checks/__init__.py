# SPDX-License-Identifier: Apache-2.0
"""What `pd-connector doctor` looks at.

`probe` and `nixl` ask the machine and write down facts; `software`, `transports`, `network`,
`limits` and `peer` turn facts into findings and touch nothing, so that tests give them any machine.
"""
