"""A server of the Model Context Protocol: `python mcp_server.py [PORT]`, standard input and output without a port."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")
state = {"count": 0}


@server.tool()
def count(by: int = 1) -> str:
    """Count on, and tell by which process."""
    state["count"] += by
    return f"{state['count']} {os.getpid()}"


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def variable(name: str) -> str:
    """Look up an environment variable."""
    return os.environ.get(name, "none")


@server.tool()
def refuse() -> str:
    """Refuse."""
    raise ToolError("not today")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


class Door:
    """Lets requests with the right token pass."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        given = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
        if scope["type"] == "http" and given != f"Bearer {os.environ['DOOR_TOKEN']}":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run()
    else:
        import uvicorn

        uvicorn.run(Door(server.streamable_http_app()), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
