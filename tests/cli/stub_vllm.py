"""Stands in for vLLM's API server: it computes nothing, and counts the loads that it is asked for.

Its ``--model`` is what it says of each: a result of a comparison; ``failed``: a failure besides; ``late``: nothing, and
a line of a failed load in the log instead.
"""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter
from functools import partial
from threading import Lock
from typing import Any

COUNTS: Counter[str] = Counter()
LOCK = Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, *args: Any, says: str) -> None:
        self.says = says
        super().__init__(*args)

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        lines = [f'kvbelay_verified_loads_total{{child="x",result="{name}"}} {COUNTS[name]}.0' for name in COUNTS]
        lines.append(f'kvbelay_outcomes_total{{side="load",result="loaded"}} {COUNTS.total() - COUNTS["failed"]}')
        lines.append(f"kvbelay_failures_total{{child='x'}} {COUNTS['failed']}")
        lines.append('vllm:num_requests_kv_fetch_by_stage{stage="in_progress"} 1.0')
        self.answer("\n".join(lines).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        params = body.get("kv_transfer_params") or {}
        if params.get("offered"):
            self.load()
        if not body.get("stream"):
            self.answer(json.dumps({"kv_transfer_params": {"offered": True}}).encode())
            return
        self.answer(b'data: {"choices": []}\n\n' * body["max_tokens"] + b"data: [DONE]\n\n")

    def load(self) -> None:
        with LOCK:
            COUNTS["same" if self.says == "failed" else self.says] += 1
            COUNTS["failed"] += self.says in {"failed", "different"}
        if self.says == "late":
            sys.stdout.write("WARNING kvbelay: load of request r failed (x: PeerLost: dead); it goes on without\n")
            sys.stdout.flush()

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--model")
    known, _ = parser.parse_known_args()
    if known.model == "ends":
        sys.exit("ValueError: no such model")
    subprocess.Popen(["/bin/sleep", "1000"])  # an engine is a process of its own
    handler = partial(Handler, says=known.model)
    http.server.ThreadingHTTPServer(("127.0.0.1", known.port), handler).serve_forever()


if __name__ == "__main__":
    main()
