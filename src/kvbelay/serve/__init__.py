"""The reference engine behind the OpenAI-compatible API, as one side of P/D: ``python -m kvbelay.serve SETTINGS``.

What it speaks is vLLM's P/D protocol: a request with ``{"do_remote_decode": true}`` is prefilled and its KV published.
What comes back goes to the decode side, which fetches the KV, or computes it itself where that fails.
"""

from __future__ import annotations

from kvbelay.errors import MissingExtra

try:
    import aiohttp  # noqa: F401 (only to say what is missing)
    import prometheus_client  # noqa: F401 (the same)
except ModuleNotFoundError as exc:
    msg = f"serving needs {exc.name}"
    raise MissingExtra(msg, remedy="install the extras: pip install 'kvbelay[demo,router]'") from exc
