# SPDX-License-Identifier: Apache-2.0
"""Property tests have no time limit: a busy machine is no failure."""

from hypothesis import settings

settings.register_profile("pd_connector", deadline=None, print_blob=True)
settings.load_profile("pd_connector")
