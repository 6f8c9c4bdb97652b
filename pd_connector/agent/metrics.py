# SPDX-License-Identifier: Apache-2.0
"""Name and description of every metric that a rank counts. Engines' doors register them."""

from pd_connector.remedies import FAILING_GAUGE
from pd_connector.telemetry import Labels

PREFIX = "pd_connector:"

COUNTERS = {
    "received_transfers": "Transfers that arrived whole and verified, counted by each rank (consumer).",
    "received_chunks": "Chunks verified and placed (consumer).",
    "received_bytes": "Bytes of verified chunks as they were on the wire (consumer).",
    "coded_transfers": "Transfers asked for with the codec, where it could be left out (consumer, `codec: auto`).",
    "plain_transfers": "Transfers asked for in `raw`, because KV comes faster without the codec, or to measure that (consumer, `codec: auto`).",
    "pulled_pieces": "Pieces of pages copied straight from the producer's memory (consumer).",
    "sent_chunks": "Chunks posted to a transport, one descriptor each (producer).",
    "early_chunks": "Those of them posted while their prompt was still being computed (producer).",
    "sent_bytes": "Bytes of chunks whose write has ended well (producer).",
    "agent_failures": "Times the agent's thread has died of an unexpected exception, or hung.",
    "closed_connections": "Connections closed because no session came over them (producer).",
    "session_errors": "Sessions and transfers ended because of an unexpected exception.",
    "pool_hits": "Chunks loaded from the pool instead of being computed.",
    "pool_far_hits": "Those of them that were brought from the far store.",
    "pool_loaded_bytes": "Bytes of these chunks, counted by each rank.",
    "agent_restarts": "Times it was started again.",
}
COUNTERS_BY_CAUSE = {
    "audits": "Prompts that were computed here, and compared with KV received, by each rank; cause `passed` is the good one (consumer).",
    "handoffs": "Requests that named a prefill engine and have ended, by what became of them: `handed_over`; computed here because the producer has not passed an audit (`audited`, `unaudited`), because all was `cached` here, or for a cause of `failed_transfers` (consumer).",
    "failed_transfers": "Transfers that did not arrive, counted by each rank; their requests were recomputed (consumer).",
    "second_prefills": "Prompts that a prefill engine was asked for again (consumer).",
    "slower_sessions": "Sessions over tcp where nixl would be faster, by the reason why not: `device`, `library`, `insecure_data`, `setup`, or `peer`, which does not offer it (producer, `transports: auto`).",
    "staged_sessions": "Sessions of a cache on a GPU whose chunks pass through slots in host memory, by the reason: `config`, `transport`, `kernels`, `memory`, `setup`, or `peer`, which has none on a device (producer).",
    "releases": "Requests whose pages were freed; cause `delivered` is the good one (producer).",
    "ignored_params": "Requests whose kv_transfer_params could not be followed.",
    "unmoved_prompts": "Prompts of more than a page whose requests ask for no handoff: `no_params`, or `nothing_asked` in their kv_transfer_params.",
    "lost_sessions": "Sessions with producers that ended (consumer).",
    "rejected_sessions": "Sessions refused to consumers (producer).",
    "pool_misses": "Chunks of the pool that were not found or not tried, loads that did not come about, and chunks not saved, by cause.",
    "pool_saves": "Chunks given to the pool, by what became of them: `saved`, `there` already, `full`, `failed`; counted by each rank.",
    "stale_chunks": "Chunks that landed for no transfer, and were dropped (consumer).",
}
COUNTERS_BY_TRANSPORT = {
    "sessions": "Sessions that began, by the transport that they took (producer).",
}
COUNTERS_BY_CODEC = {
    "asked_transfers": "Transfers asked for, by the codec of their KV; each rank of a producer is asked apart (consumer).",
}
COUNTERS_BY_TIER = {
    "pool_unwritten": "Chunks that a tier of the pool could not take, by `tier` (`memory`, `disk`) and cause: `no_room`, `no_inodes`, `quota`, `read_only`, `permission`, `failed`. The log names the folder and what to do.",
}
COUNTERS_OF_PAIRS = {
    "pair_bytes": "Bytes of verified chunks, by the prefill rank that sent them, and by codec (consumer).",
    "pair_chunks": "Verified chunks, by the prefill rank that sent them. `prompt` is `computing` if they came while it was (consumer).",
    "pair_transfers": "Transfers that have ended, by their prefill rank; result `received`, or the cause of their failure (consumer).",
}
PRODUCER = "producer"
"""Label of a prefill rank: host and control port."""
LABELLED = (
    COUNTERS_BY_CAUSE
    | COUNTERS_BY_TRANSPORT
    | COUNTERS_BY_CODEC
    | COUNTERS_BY_TIER
    | COUNTERS_OF_PAIRS
)
"""The counters with labels of their own."""
LABELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(COUNTERS_BY_CAUSE, ("cause",)),
    **dict.fromkeys(COUNTERS_BY_TRANSPORT, ("transport",)),
    **dict.fromkeys(COUNTERS_BY_CODEC, ("codec",)),
    **dict.fromkeys(COUNTERS_BY_TIER, ("tier", "cause")),
    "pair_bytes": (PRODUCER, "codec"),
    "pair_chunks": (PRODUCER, "prompt"),
    "pair_transfers": (PRODUCER, "result"),
}
"""The labels of each counter that has some."""
GAUGES = {
    "leased_pages": "Pages kept for consumers (producer).",
    "outgoing_transfers": "Transfers expected, offered or streaming (producer).",
    "incoming_transfers": "Transfers held or loading (consumer).",
    "landing_slots": "Landing slots that are not free (consumer).",
    "send_slots": "Send slots that are not free (producer).",
    "device_slots": "Slots in device memory; 0 where all are in host memory.",
    "consumer_sessions": "Sessions with consumers (producer).",
    "producer_sessions": "Sessions with producers (consumer).",
    "distrusted_producers": "Ranks of producers whose KV an audit found wrong (consumer).",
    "weights_bytes": "Bytes of the files that the weights were loaded from, as each rank counts them. No KV passes before all of them are read.",
    "weights_read_bytes": "How many of them are read.",
    FAILING_GAUGE: "Ranks that have asked for KV for a minute and more, and none has arrived (consumer).",
}
UNDER_WAY = ("landing_slots", "send_slots", "incoming_transfers", "outgoing_transfers")
"""Gauges that are above zero while transfers are under way."""
HISTOGRAMS = {
    "transfer_seconds": "From prefill ended and pages allocated to all chunks verified and placed (consumer).",
}


def values_of(name: str, labels: Labels) -> list[str]:
    """The values of a counter's labels, in the order of `LABELS`; an empty string for a label that is not given."""
    given = dict(labels)
    return [given.get(label, "") for label in LABELS.get(name, ())]


BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
