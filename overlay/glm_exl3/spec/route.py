"""`GET` and `PUT /v1/drafting`: see and change adaptive k while the server runs.

An endpoint plugin (`vllm.endpoint_plugins`, named in `VLLM_PLUGINS`). The path lies under `/v1`, so
vLLM's own middleware asks for the API key before this code is reached; a server without a key
refuses, because anybody could slow it down. The change travels as a utility call to the engine's
process, where `patches.drafting_control` hands it to the scheduler between two steps.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

PATH = "/v1/drafting"
UTILITY = "glm_exl3_drafting"
MAX_BODY_BYTES = 4096


def answer(result: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for what the engine said."""
    if "unavailable" in result:
        return 409, {"error": result["unavailable"]}
    if "invalid" in result:
        return 400, {"error": result["invalid"]}
    return 200, result


def has_key(args: Any) -> bool:
    """Whether vLLM checks keys: the rule of its middleware."""
    keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return any(keys)


class DraftingRoute:
    """The plugin object that vLLM asks for routes and gives the engine's client."""

    name = "glm_exl3_drafting"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def __init__(self) -> None:
        self.engine: Any = None
        self.guarded = False

    def attach_router(self, app: Any) -> None:
        app.add_api_route(PATH, self.handle, methods=["GET", "PUT"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        del state
        self.engine, self.guarded = engine_client, has_key(args)

    async def reply(self, method: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and body for one request."""
        import json

        if not self.guarded:
            return 403, {"error": "this server has no API key; set VLLM_API_KEY to use drafting"}
        options: Any = {}
        if method == "PUT":
            try:
                options = json.loads(body) if len(body) <= MAX_BODY_BYTES else None
            except ValueError:
                options = None
            if not isinstance(options, dict) or not options:
                return 400, {"error": "send a JSON object of mode, lengths, rate, step_ms"}
        result = await self.engine.engine_core.call_utility_async(UTILITY, options)
        return answer(result)

    async def handle(self, request: Any) -> Any:
        from fastapi.responses import JSONResponse

        status, body = await self.reply(request.method, await request.body())
        return JSONResponse(body, status_code=status)


def _annotate() -> None:
    """FastAPI recognises the request by its annotation; imported here to keep others light."""
    from fastapi import Request

    DraftingRoute.handle.__annotations__["request"] = Request


def plugin() -> DraftingRoute:
    """The entry point's factory."""
    _annotate()
    return DraftingRoute()
