# SPDX-License-Identifier: Apache-2.0
"""`python -m pd_connector`: the same as `pd-connector`, in an environment whose scripts are not on PATH."""

import sys

from pd_connector.tools.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
