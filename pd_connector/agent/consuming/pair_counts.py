# SPDX-License-Identifier: Apache-2.0
"""Counts chunks, bytes and transfers by the prefill rank that sent them."""

from pd_connector.protocol.consuming.incoming import Finished, IncomingChunk
from pd_connector.protocol.wire.peers import Source
from pd_connector.telemetry import Telemetry

MOST_PRODUCERS = 128
"""Most values of the label `producer`. Further ranks are counted together: Prometheus keeps a series for each value, and a
decode engine can outlive many prefill engines."""
OTHERS = "others"


class PairCounts:
    """The counters `agent.metrics.COUNTERS_OF_PAIRS`. Used by the agent's thread only."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._names: set[str] = set()

    def received(self, chunk: IncomingChunk) -> None:
        """A chunk has been verified."""
        producer = self._name(chunk.source)
        prompt = "computing" if chunk.early else "computed"
        self._telemetry.count("pair_chunks", producer=producer, prompt=prompt)
        codec, nbytes = chunk.route.codec, chunk.header.nbytes
        self._telemetry.count("pair_bytes", nbytes, producer=producer, codec=codec)

    def ended(self, finished: Finished) -> None:
        """A load has ended, with success or without."""
        if finished.source is not None:
            producer, result = self._name(finished.source), finished.cause or "received"
            self._telemetry.count("pair_transfers", producer=producer, result=result)

    def _name(self, source: Source) -> str:
        name = source.label
        if name not in self._names:
            if len(self._names) >= MOST_PRODUCERS:
                return OTHERS
            self._names.add(name)
        return name
