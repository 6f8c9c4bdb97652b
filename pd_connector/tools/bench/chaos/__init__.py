# SPDX-License-Identifier: Apache-2.0
"""`bench chaos`: faults, counted. Every transfer's pages are compared, after every fault.

- `faults`: the kinds of faults, and how long recovery may take
- `tampering`: a transport that loses, delays, repeats, cuts, damages, reorders or mislabels chunks
- `connections`: TCP connections of this process that are reset or go silent
- `liar`: a peer whose messages fit the schema and are not true
- `agent`: one rank: an agent, its cache, and the faults that it does to itself
- `nursery`: starts ranks by forking
- `ranks`: the ranks of one transport, as their launcher sees them
- `ledger`: what became of faults and transfers
- `campaign`: faults of one kind over one transport, seeded
- `engines`: the same on a real prefill engine, decode engine and router
- `report`: the table
"""
