# SPDX-License-Identifier: Apache-2.0
"""The door to SGLang: `--schedule-policy pd_scheduler`. The order itself comes from `scheduler_plugins.queue`.

`plugin.py` is the entry point, and names the hooked functions of SGLang. `policy.py` replaces SGLang's `SchedulePolicy`
and `PrefillAdder`. `decide.py` decides on one rank which requests start in a step, and `ranks.py` tells the other
ranks. `prefixes.py` looks prompts up in SGLang's radix cache.
"""
