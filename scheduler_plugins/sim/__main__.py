# SPDX-License-Identifier: Apache-2.0
"""`python -m scheduler_plugins.sim TRACE`: the command `pd-router simulate`."""

import sys

from scheduler_plugins.sim.command import main

if __name__ == "__main__":
    sys.exit(main())
