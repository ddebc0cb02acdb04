"""What a client may hand a P/D child in ``kv_transfer_params``.

Connectors take these for what another engine wrote, and trust them. They come with a request, so that anybody can
write them; a value of the wrong kind raises inside a connector long after it was asked, in every step, or has it
wait for a load that it never began.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

MOST_BLOCKS = 1 << 20
LONGEST = 256
HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")


def refusal(params: Mapping[str, Any], *, needed: tuple[str, ...], hosts: frozenset[str] | None) -> str:
    """Why a child must not see these parameters; empty: it may.

    ``needed`` names what has to be there where the request asks for a load; ``hosts`` the only ones that may be
    pulled from, None for any.
    """
    for key, right in RIGHT.items():
        value = params.get(key)
        if value is not None and not right(value):
            return f"{key} is a {type(value).__name__} that no engine sends"
    if params.get("do_remote_prefill"):
        missing = [key for key in needed if params.get(key) is None]
        if missing:
            return f"it asks for a load without {', '.join(missing)}"
        if hosts is not None and params.get("remote_host") not in hosts:
            return "remote_host is not one of the option hosts"
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 16


def _is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= LONGEST


def _is_host(value: Any) -> bool:
    return type(value) is str and HOST.fullmatch(value) is not None


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_time(value: Any) -> bool:
    return type(value) in {int, float} and math.isfinite(value)


def _are_blocks(value: Any) -> bool:
    """Block ids, or rows of them by KV cache group."""
    if type(value) not in {list, tuple}:
        return False
    rows = value if all(type(row) in {list, tuple} for row in value) else (value,)
    return sum(map(len, rows)) <= MOST_BLOCKS and all(_is_count(block) for row in rows for block in row)


RIGHT: dict[str, Callable[[Any], bool]] = {
    "do_remote_prefill": _is_flag,
    "do_remote_decode": _is_flag,
    "remote_engine_id": _is_name,
    "remote_request_id": _is_name,
    "remote_host": _is_host,
    "remote_port": _is_size,
    "remote_block_ids": _are_blocks,
    "remote_num_tokens": _is_count,
    "remote_block_size": _is_size,
    "remote_blocks_expiry_time": _is_time,
    "tp_size": _is_size,
    "dcp_size": _is_size,
    "pp_size": _is_size,
}
"""The keys that vLLM's own P/D connectors read."""
