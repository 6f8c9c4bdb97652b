# SPDX-License-Identifier: Apache-2.0
"""The prefill/decode router: one OpenAI API in front of prefill and decode engines.

docs/architecture.md lists its rooms, floor by floor, and follows one request through them. `request/proxy.py` has the
life of a request, and `request/dispatch.py` one attempt. `policies/` choose the engines, without I/O.
"""
