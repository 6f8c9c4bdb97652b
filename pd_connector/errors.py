# SPDX-License-Identifier: Apache-2.0
"""Exceptions, the causes under which every failure is counted, and the word that was probably meant."""

import difflib
from collections.abc import Iterable
from enum import StrEnum


class PDConnectorError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(PDConnectorError, ValueError):
    """Config values are not usable. `args` has a text for each: it names the key, the value and what to do."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class UnsupportedGeometryError(PDConnectorError, ValueError):
    """This version cannot move this engine's cache. The message says what is missing."""


class TransportError(PDConnectorError):
    """A transport could not be set up, or refused a write."""


class MalformedMessageError(PDConnectorError, ValueError):
    """Bytes from a peer are not a message of the schema."""


class Miss(StrEnum):
    """Why a chunk of the KV pool is not used. The value is the label `cause` of the metrics."""

    CODEC = "codec"  # its KV has passed in a codec that this engine does not permit
    DAMAGED = "damaged"  # its bytes are not those that were written, or not of the pool
    DRAFT = "draft"  # it has no KV of this engine's draft model
    EVICTED = "evicted"  # it was there, and made room for others
    LATE = "late"  # it was not found or read in time
    NEVER_STORED = "never_stored"  # no engine has stored it
    NOT_WORTH = "not_worth"  # computing it is faster
    REFUSED = "refused"  # the store refused to read or write
    RESET = "reset"  # it was saved before this engine's caches were reset
    UNLIKE = "unlike"  # it is of another model, prompt or kind of cache, or of another schema


class PoolError(PDConnectorError):
    """A chunk of the KV pool cannot be used, or not be stored. `cause` says why in a word."""

    def __init__(self, cause: Miss, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


class Cause(StrEnum):
    """Why a transfer did not deliver. The value is the label `cause` of the metrics."""

    ABORTED = "aborted"  # consumer: the client went away
    AGENT_HUNG = "agent_hung"  # the agent's thread did not answer its engine
    ASLEEP = "asleep"  # this engine went to sleep, and its pages are gone
    AUDIT = "audit"  # the producer's KV differs from what this engine computes
    AUTHENTICATION = "authentication"  # the peer has another key, or none
    CHECKSUM = "checksum"  # the bytes that landed are not the bytes that were sent
    CHUNK_MISMATCH = "chunk_mismatch"  # a chunk differs from the plan's chunk at its place
    CODEC = (
        "codec"  # its KV depends on KV that has passed in a codec that this engine does not permit
    )
    DRAFT = "draft"  # the producer does not have this engine's draft model
    DUPLICATE = "duplicate"  # the transfer id is already in use
    ENGINE_HUNG = "engine_hung"  # the producer's agent answers, but its engine computes no step
    GEOMETRY = "geometry"  # KV cannot pass between the two caches
    INSECURE_ADDRESS = "insecure_address"  # no key, and the address is not loopback
    INTERNAL = "internal"  # an unexpected exception on this side, logged with its traceback
    LEASE_EVICTED = (
        "lease_evicted"  # its pages were needed for others, while no consumer had room for it
    )
    LEASE_EXPIRED = "lease_expired"  # no consumer fetched the pages before lease_s had passed
    MALFORMED_MESSAGE = "malformed_message"  # bytes that are not a message of the schema
    MALFORMED_PARAMS = "malformed_params"  # kv_transfer_params that cannot be read
    MODEL = "model"  # the peer serves another model
    NO_ROOM = "no_room"  # the consumer's cache is too small for the prompt, even when empty
    NO_TRANSPORT = "no_transport"  # the two sides share no transport
    NOT_NEEDED = "not_needed"  # the consumer has the pages already
    POOL = "pool"  # what the pool has of a prompt cannot be used
    PREEMPTED = "preempted"  # the producer's engine took pages back, perhaps while they were read
    PREFILL_ENDED = "prefill_ended"  # the prefill request ended without pages to hand over
    ROLE = "role"  # the request needs a part (produce or consume) that kv_role excludes
    SESSION_LOST = "session_lost"  # the connection broke, or the peer fell silent
    SESSION_LIMIT = "session_limit"  # the producer already has its most sessions
    STALLED = "stalled"  # no chunk arrived for longer than stall_timeout_s
    TOKENS = "tokens"  # the peer's pages belong to other tokens
    TRANSPORT = "transport"  # the transport reported a failed write
    UNAUDITED = "unaudited"  # the producer has passed no audit since it started
    UNKNOWN_TRANSFER = "unknown_transfer"  # the producer has no such pages, or no longer
    UNREAD = "unread"  # one side has not read all bytes of its weights yet
    UNREACHABLE = "unreachable"  # no connection to the producer
    UNTRUSTED_ADDRESS = "untrusted_address"  # a producer's address is not sealed and not in `peers`
    VERSION = "version"  # no common schema version
    WAIT_TIMEOUT = "wait_timeout"  # the prefill did not finish within wait_timeout_s
    WINDOW = "window"  # a sliding window has passed the wanted tokens
    WORDS = "words"  # the producer did not send the final token that the consumer needs


HANDOFF_FAILED = "the handoff failed, and the decode engine knows"
"""A prefill engine's error answer has these words if the prompt was computed and its KV did not pass. The decode engine
hears of it at the same time and goes on by itself, so a router lets it."""


def did_you_mean(name: object, words: Iterable[str]) -> str:
    """`did you mean 'X'?` if one of the known words is close to this one, else an empty string."""
    near = difflib.get_close_matches(str(name), list(words), n=1)
    return f"did you mean {near[0]!r}?" if near else ""
