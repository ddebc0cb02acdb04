"""The vLLM guard: name this module in ``kv_connector_module_path`` of an existing ``MultiConnector`` configuration.

``KVBELAY_VLLM=off`` in the environment brings the host's own class instead, without a change of configuration.
"""

from __future__ import annotations

import os

if os.environ.get("KVBELAY_VLLM", "").lower() == "off":
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
else:
    from kvbelay.vllm import host

    host.must_be_new_enough()

    from kvbelay.vllm.multi import MultiConnector

__all__ = ["MultiConnector"]
