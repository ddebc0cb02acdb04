"""Logs like those of a prefill and a decode engine, of any size, from a seed."""

from __future__ import annotations

from pathlib import Path
from random import Random

BLOCK_NBYTES = 1 << 20
BLOCKS = 16
"""Different ones; then they come again, with other times."""
MINUTE = b"@@:@@"

ORDINARY = (
    (
        "(APIServer pid=5532) INFO 11-29 {at} [loggers.py:335] Engine 000: Avg prompt throughput: {n}.6 "
        "tokens/s, Avg generation throughput: {n}.2 tokens/s, Running: {k} reqs, Waiting: {k} reqs, "
        "Deferred: 0 reqs, KV fetch: 0 waiting to start, {k} in progress, 2 completed waiting, GPU KV cache "
        "usage: 42.5%, Prefix cache hit rate: 12.0%"
    ),
    (
        "(APIServer pid=5532) INFO 11-29 {at} [metrics.py:103] KV Transfer metrics: NixlConnector={{'Num "
        "successful transfers': {n}, 'Avg xfer time (ms)': 87.217, 'P90 xfer time (ms)': 241.62, 'Avg post "
        "time (ms)': 3.382, 'Avg MB per transfer': 4.219, 'Throughput (MB/s)': 48.4, 'Num failed transfers': "
        "0, 'Num KV expired reqs': 0}}"
    ),
    '(APIServer pid=5532) INFO:     10.0.0.{k}:{n} - "POST /v1/completions HTTP/1.1" 200 OK',
    (
        "(APIServer pid=5532) INFO 11-29 {at} [logger.py:49] Received request cmpl-{id}-0: params: "
        "SamplingParams(n=1, temperature=0.0, top_p=1.0, max_tokens={n}, stop=[], seed=None), lora_request: "
        "None."
    ),
    "(APIServer pid=5532) INFO 11-29 {at} [async_llm.py:411] Added request cmpl-{id}-0-{k}d336b17.",
    (
        "(EngineCore pid=5607) DEBUG 11-29 {at} [v1/core/sched/scheduler.py:1422] Finished receiving KV "
        "transfer for request cmpl-{id}-0-{k}d336b17"
    ),
    (
        "(Worker_TP0 pid=5663) DEBUG 11-29 {at} [nixl/pull_worker.py:512] Remote agent {id}-{n} available, "
        "calling _read_blocks for req cmpl-{id}-0-{k}d336b17"
    ),
    ("(Worker_TP0 pid=5663) INFO 11-29 {at} [base_worker.py:1093] NIXL compatibility check passed (hash: {id}{id})"),
    (
        "[2026-11-29 {at},{n}] LMCache INFO: Stored {n} out of total {n} tokens. size: 0.{n} gb, cost {k}.2 "
        "ms, throughput: 12.1 GB/s (cache_engine.py:380:lmcache.v1.cache_engine)"
    ),
    "I1129 {at}.{n}  4420 client_service.cpp:611] Mounted segment 10.0.0.{k}:15995, {n} of {n} bytes",
    ("[1764380603.{n}] [decode-0:5663 :0]        ucp_worker.c:1888 UCX  INFO  ep_cfg[{k}]: tag(tcp/eth0) am(tcp/eth0)"),
)
FAILING = (
    (
        "(Worker pid=5663) ERROR 11-29 {at} [base_worker.py:3090] NIXL transfer failure: transfer_failed | "
        "Context: {{'failure_type': 'transfer_failed', 'request_id': 'cmpl-{id}-0-{k}d336b17', 'xfer_state': "
        "'ERR'}}"
    ),
    (
        "E1129 {at}.{n}  4420 nixl_agent.cpp:1198] postXferReq: remote agent '{id}' was disconnected after "
        "transfer request creation"
    ),
    (
        "(EngineCore pid=5607) ERROR 11-29 {at} [scheduler.py:3417] Failing 1 request(s) due to KV load "
        "failure (failure_policy=fail, 92 tokens affected). Request IDs: {{'cmpl-{id}-0-{k}d336b17'}}"
    ),
    ('(APIServer pid=5532) INFO:     10.0.0.{k}:{n} - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'),
    (
        "(Worker pid=5663) Traceback (most recent call last):\n(Worker pid=5663)   File "
        '"site-packages/nixl_cu12/_api.py", line 665, in transfer\n(Worker pid=5663)     status = '
        "self.agent.postXferReq(handle._handle, notif_msg)\n(Worker pid=5663) "
        "nixl_cu12._bindings.nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT"
    ),
)


def write(path: Path, nbytes: int, *, failing: float, seed: int) -> None:
    """A log of that size at least; so many of its lines, as a share, tell of failures."""
    dice = Random(seed)  # noqa: S311 # not cryptography
    blocks = [_block(dice, failing) for _ in range(min(BLOCKS, nbytes // BLOCK_NBYTES + 1))]
    with path.open("wb") as log:
        minute = 0
        while log.tell() < nbytes:
            log.write(blocks[minute % len(blocks)].replace(MINUTE, b"%02d:%02d" % (minute // 60 % 24, minute % 60)))
            minute += 1


def _block(dice: Random, failing: float) -> bytes:
    lines: list[bytes] = []
    size = 0
    while size < BLOCK_NBYTES:
        kinds = FAILING if dice.random() < failing else ORDINARY
        at = f"{MINUTE.decode()}:{min(59, size * 60 // BLOCK_NBYTES):02}"
        fields = {"at": at, "n": dice.randrange(10000), "k": dice.randrange(10), "id": f"{dice.getrandbits(64):016x}"}
        line = dice.choice(kinds).format(**fields).encode() + b"\n"
        lines.append(line)
        size += len(line)
    return b"".join(lines)
