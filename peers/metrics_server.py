"""The peer's small HTTP server: `/metrics` for Prometheus, `/status` as JSON.

It runs in the communication loop, answers GET and HEAD, closes after each answer, and gives nobody more than a few
seconds, a few kilobytes and a few connections.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from peers.config import UserError

logger = logging.getLogger("swarm_peer.metrics")

REQUEST_BYTES = 8 * 1024
DEADLINE_S = 5.0
CONNECTIONS = 32
JSON_TYPE = "application/json; charset=utf-8"
TEXT_TYPE = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
}
Answer = tuple[int, str, bytes]
"""Status code, content type, body."""


class MetricsServer:
    """Serves metrics and status on one address. Made by `start`; lives in the loop it was made in."""

    def __init__(self, registry: CollectorRegistry, status: Callable[[], Mapping[str, Any]]) -> None:
        self._registry = registry
        self._status = status
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self.host = ""
        self.port = 0

    @classmethod
    async def start(
        cls, host: str, port: int, registry: CollectorRegistry, status: Callable[[], Mapping[str, Any]]
    ) -> MetricsServer:
        """Listen; `port` 0 takes any free one, and the server's `port` is the real one.

        status: gives the map served at /status. Raises UserError naming host and port if they cannot be had.
        """
        server = cls(registry, status)
        try:
            server._server = await asyncio.start_server(server._serve, host, port, limit=REQUEST_BYTES)
        except (OSError, OverflowError) as error:
            raise UserError(_why(host, port, error)) from error
        server.host, server.port = server._server.sockets[0].getsockname()[:2]
        return server

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def close(self) -> None:
        """Stop listening and end every connection. Harmless when repeated."""
        if self._server is not None:
            self._server.close()
        # Not by cancelling: in Python 3.11 a stream's callback complains aloud about a cancelled handler.
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= CONNECTIONS:
            writer.transport.abort()
            return
        self._connections[task] = writer
        try:
            async with asyncio.timeout(DEADLINE_S):
                try:
                    method, (code, kind, body) = self._answer(await reader.readuntil(b"\r\n\r\n"))
                except asyncio.LimitOverrunError:
                    method, code, kind, body = "GET", 400, TEXT_TYPE, b"request too large\n"
                allow = "Allow: GET, HEAD\r\n" if code == 405 else ""
                writer.write(
                    f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                    f"{allow}Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode()
                )
                if method != "HEAD":
                    writer.write(body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, RuntimeError):
            pass  # too slow, or gone
        finally:
            self._connections.pop(task, None)
            with suppress(OSError, RuntimeError):
                writer.close()

    def _answer(self, head: bytes) -> tuple[str, Answer]:
        """Method and answer of a request."""
        parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return "GET", (400, TEXT_TYPE, b"not an HTTP/1 request\n")
        method, target, _ = parts
        if method not in {"GET", "HEAD"}:
            return "GET", (405, TEXT_TYPE, b"only GET and HEAD are answered\n")
        try:
            match target.split("?", 1)[0]:
                case "/metrics":
                    return method, (200, CONTENT_TYPE_LATEST, generate_latest(self._registry))
                case "/status":
                    text = json.dumps(finite(self._status()), allow_nan=False)
                    return method, (200, JSON_TYPE, text.encode() + b"\n")
                case "/":
                    return method, (200, TEXT_TYPE, b"swarm-peer: see /metrics and /status\n")
        except Exception:
            # The scraper must learn of it, and a scrape must not end the peer.
            logger.exception("answering %s failed", target[:100])
            return method, (500, TEXT_TYPE, b"failed: see the peer's log\n")
        return method, (404, TEXT_TYPE, b"not here: see /metrics and /status\n")


def finite(value: Any) -> Any:
    """The value with infinities and NaN as None: JSON has no words for them. Keys become strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _why(host: str, port: int, error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return (
            f"--metrics-port {port} on {host} is taken by another program: choose another one, or 0 for any"
        )
    if number == errno.EACCES:
        return f"--metrics-port {port} may not be used: ports below 1024 need root; choose a higher one, or 0"
    if number == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"--metrics-host {host} is no address of this machine: use 127.0.0.1, or 0.0.0.0 for all"
    return f"cannot serve metrics on {host}:{port}: {error}"
