# SPDX-License-Identifier: Apache-2.0
"""The checks of `pd-connector doctor`.

`probe` and `nixl` examine the machine and record facts. `software`, `transports`, `network`, `limits` and `peer` turn
facts into findings and touch nothing, so that tests can describe any machine.
"""
