"""A P/D proxy as there are many: prefill, then decode, each once. Run as a program, it takes the options of our router.

What it loses is what a router that retries and falls back must not lose.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json

from aiohttp import ClientError, ClientSession, ClientTimeout, web

OFFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PATIENCE_S = 20.0


class Proxy:
    """Takes the servers in turn."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)

    async def ready(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        first = {**asked, "stream": False, "max_tokens": 1, "kv_transfer_params": OFFER}
        first.pop("stream_options", None)
        try:
            async with ClientSession(timeout=ClientTimeout(PATIENCE_S)) as session:
                async with session.post(next(self._prefill) + request.path, json=first) as answer:
                    answer.raise_for_status()
                    params = (await answer.json())["kv_transfer_params"]
                then = {**asked, "kv_transfer_params": params}
                async with session.post(next(self._decode) + request.path, json=then) as answer:
                    answer.raise_for_status()
                    response = web.StreamResponse(headers={"Content-Type": answer.content_type})
                    await response.prepare(request)
                    async for piece in answer.content.iter_any():
                        await response.write(piece)
                    return response
        except (ClientError, asyncio.TimeoutError) as exc:
            return web.Response(status=502, text=json.dumps({"error": {"message": repr(exc)}}))


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--prefill", "--decode"):
        parser.add_argument(option, action="append", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    proxy = Proxy(options.prefill, options.decode)
    app = web.Application()
    app.router.add_get("/ready", proxy.ready)
    app.router.add_post("/v1/completions", proxy.serve)
    app.router.add_post("/v1/chat/completions", proxy.serve)
    web.run_app(app, host=options.host, port=options.port, print=None, access_log=None, shutdown_timeout=0.5)


if __name__ == "__main__":
    main()
