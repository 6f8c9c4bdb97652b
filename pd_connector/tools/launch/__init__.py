# SPDX-License-Identifier: Apache-2.0
"""Starting, watching and ending real processes: for `demo`, `bench` and the tests.

- `family`: a process and everything it started, ended as one, counted (`Census`), and ended if the launcher dies
- `proc`: processes as `/proc` shows them
- `ports`: ports that no other program takes between choosing and listening
- `service`: an HTTP server that is such a family: readiness, log, restart
- `start_log`: how far a start has come, and why it failed, from the log
- `engine`, `sglang`, `router`: the services
- `client`: HTTP requests to services, and their metrics
- `progress`: what a person sees while services start, or work is done
"""

from pd_connector.tools.launch.client import Client, HttpError, Samples
from pd_connector.tools.launch.engine import VllmEngine
from pd_connector.tools.launch.family import Census, Family, stop_all, terminate_as_interrupt
from pd_connector.tools.launch.ports import Port
from pd_connector.tools.launch.progress import wait_all, working
from pd_connector.tools.launch.router import RouterProcess
from pd_connector.tools.launch.service import Service, StartError, stop_services

__all__ = [
    "Census",
    "Client",
    "Family",
    "HttpError",
    "Port",
    "RouterProcess",
    "Samples",
    "Service",
    "StartError",
    "VllmEngine",
    "stop_all",
    "stop_services",
    "terminate_as_interrupt",
    "wait_all",
    "working",
]
