# SPDX-License-Identifier: Apache-2.0
"""`python -m pd_connector.tools.cli`: the same as `pd-connector`, without its console script."""

import sys

from pd_connector.tools.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
