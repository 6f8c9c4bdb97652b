# SPDX-License-Identifier: Apache-2.0
"""What the connector's scheduler side and worker side tell each other, through vLLM."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pd_connector.agent import Command


@dataclass
class StepCommands(KVConnectorMetadata):
    """Scheduler to worker, each step: commands for the agent, in order."""

    commands: list[Command] = field(default_factory=list)


@dataclass
class RankAddress(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: where consumers reach this rank (port 0: nowhere)."""

    host: str
    port: int


@dataclass
class WorkerActivity(KVConnectorWorkerMetadata):
    """Worker to scheduler, each step: slots that have not come home."""

    slots: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerActivity":
        assert isinstance(other, WorkerActivity)
        return WorkerActivity(self.slots + other.slots)
