# SPDX-License-Identifier: Apache-2.0
"""The door to SGLang: `--schedule-policy pd_scheduler`. The order itself is `scheduler_plugins.queue`'s.

`plugin.py` is the entry point and names SGLang's functions that are hooked. `policy.py` stands where
SGLang has its `SchedulePolicy` and its `PrefillAdder`; `decide.py` says what starts in a step, on one
rank, and `ranks.py` tells the others. `prefixes.py` looks prompts up in SGLang's radix cache.
"""
