# SPDX-License-Identifier: Apache-2.0
"""`PYTHONPATH=ci python -m chaos`: faults, counted. Every transfer's pages are compared, after every fault.

- `faults`: the kinds of faults, and how long recovery may take
- `known`: a cache whose every byte is known to both sides
- `engine`: an engine that offers, loads, compares, and takes pages back in the middle of a copy
- `tampering`: the armed faults of a rank, and the paths of its chunks
- `wrapping`, `seam`: a transport that loses, delays, repeats, cuts, reorders or mislabels chunks
- `wire`: a network that flips, cuts, repeats, swaps or loses records below their seal
- `connections`: TCP connections of this process that are reset or go silent
- `liar`: a peer whose messages fit the schema and are not true
- `agent`: one rank: an agent, its engine, and its faults
- `blind`: guards taken off, for controls
- `nursery`: starts ranks by forking
- `ranks`: the ranks of one transport, as their launcher sees them
- `transfers`: transfers of random pages between these
- `ledger`: counts of faults and transfers, by outcome
- `campaign`: faults of one kind over one transport, seeded
- `bench`: every fault over every transport, and controls before them
- `engines`: the same on a real prefill engine, decode engine and router
- `report`: the tables
"""
