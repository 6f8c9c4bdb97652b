# SPDX-License-Identifier: Apache-2.0
"""The prefill/decode router: one OpenAI API in front of prefill and decode engines.

docs/architecture.md lists its rooms, floor by floor, and follows one request through them. The life of
a request is `request/proxy.py`, one attempt of it `request/dispatch.py`; which engines serve it is decided in `policies/`, without I/O.
"""
