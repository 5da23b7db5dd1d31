"""Metrics have base units and bounded labels, and the small HTTP server survives its visitors."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from peers import metrics_server
from peers.config import UserError
from peers.metrics import Metrics
from peers.metrics_server import MetricsServer
from peers.traffic import Traffic

Labels = dict[str, str]


def samples(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_bytes_are_those_traffic_counted() -> None:
    traffic = Traffic()
    metrics = Metrics(traffic)
    traffic.count("up", "forward", 1, 100)
    traffic.count("up", "forward", 1, 50)
    traffic.count("down", "chunk", -1, 7)
    found = samples(metrics)
    assert found["swarm_peer_bytes_total"] == {
        (("direction", "up"), ("kind", "forward"), ("neighbour_stage", "1")): 150,
        (("direction", "down"), ("kind", "chunk"), ("neighbour_stage", "none")): 7,
    }
    assert found["swarm_peer_frames_total"][("direction", "up"), ("kind", "forward")] == 2
    assert found["swarm_peer_frames_total"][("direction", "down"), ("kind", "gradient")] == 0
    assert dict(traffic.frames) == {("up", "forward"): 2, ("down", "chunk"): 1}  # a scrape adds nothing


def test_the_page_of_metrics_lists_what_there_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(swarm_peer_\w+)` \| (\w+) \| ([^|]*) \|", page, flags=re.MULTILINE)
    families = list(Metrics(Traffic(5, 5)).registry.collect())
    assert [name.removesuffix("_total") for name, _, _ in listed] == [family.name for family in families]
    for (name, kind, labels), family in zip(listed, families, strict=True):
        assert kind == ("gauge" if family.type == "stateset" else family.type), name
        seen = {label for sample in family.samples for label in sample.labels} - {"le", name}
        assert seen <= set(re.findall(r"`(\w+)`", labels)), name


def test_no_remote_text_becomes_a_label() -> None:
    traffic = Traffic()
    metrics = Metrics(traffic)
    before = {name: len(series) for name, series in samples(metrics).items()}
    for number in range(50):
        traffic.refuse(f"invented {number}")
        metrics.round("failed", 1.0, f"invented {number}")
        traffic.count("up", "forward", 10_000 + number, 1)
    found = samples(metrics)
    assert found["swarm_peer_frames_refused_total"][("reason", "other"),] == 50
    assert found["swarm_peer_rounds_total"][("reason", "other"), ("result", "failed")] == 50
    assert len(found["swarm_peer_bytes_total"]) == 1
    assert {name: len(series) for name, series in found.items() if name != "swarm_peer_bytes_total"} == {
        **{name: count for name, count in before.items() if name != "swarm_peer_bytes_total"},
        **{name: len(series) for name, series in found.items() if "round_seconds" in name},
    }
    with pytest.raises(ValueError, match="none of done"):
        metrics.microbatch("invented")  # type: ignore[arg-type]


def test_every_name_has_the_prefix_and_every_series_exists_from_the_start() -> None:
    metrics = Metrics(Traffic())
    found = samples(metrics)
    assert all(name.startswith("swarm_peer_") for name in found)
    assert found["swarm_peer_microbatches_total"][("outcome", "replayed"),] == 0
    assert found["swarm_peer_rounds_total"][("reason", "digest"), ("result", "failed")] == 0
    assert found["swarm_peer_resident_memory_bytes"][()] > 1e6
    metrics.state.state("online")
    assert samples(metrics)["swarm_peer_state"][("swarm_peer_state", "online"),] == 1


def test_caps_and_waits_are_told_by_direction_and_priority() -> None:
    traffic = Traffic(8.0, None)
    traffic.upload.waited_s[3] = 2.5
    found = samples(Metrics(traffic))
    assert found["swarm_peer_cap_bytes_per_second"] == {(("direction", "up"),): 1e6}
    waits = found["swarm_peer_shaper_wait_seconds_total"]
    assert waits[("direction", "up"), ("priority", "averaging")] == 2.5
    assert len(waits) == 8 and sum(waits.values()) == 2.5


def test_links_are_looked_up_when_somebody_asks() -> None:
    metrics = Metrics(Traffic())
    hello = SimpleNamespace(stage=2)
    links: list[Any] = [SimpleNamespace(hello=hello, rtt_s=rtt) for rtt in (0.05, 0.02, None)]
    metrics.links = links
    found = samples(metrics)
    assert found["swarm_peer_links"][("neighbour_stage", "2"),] == 3
    assert found["swarm_peer_link_rtt_seconds"][("neighbour_stage", "2"),] == 0.05


def test_a_blocked_loop_shows_as_lag() -> None:
    metrics = Metrics(Traffic())

    async def scenario() -> None:
        watch = asyncio.create_task(metrics.watch_loop(0.01))
        await asyncio.sleep(0)
        import time

        time.sleep(0.2)  # noqa: ASYNC251  what a loop must never do
        await asyncio.sleep(0.02)
        watch.cancel()

    asyncio.run(scenario())
    assert samples(metrics)["swarm_peer_loop_lag_seconds_sum"][()] > 0.1
    assert samples(metrics)["swarm_peer_loop_lag_recent_max_seconds"][()] > 0.1


def serving(scenario: Callable[[MetricsServer], Awaitable[None]], status: Any = None) -> None:
    async def run() -> None:
        metrics = Metrics(Traffic())
        server = await MetricsServer.start("127.0.0.1", 0, metrics.registry, lambda: status or {})
        try:
            await scenario(server)
        finally:
            await server.close()
            await server.close()

    asyncio.run(run())


async def get(url: str, method: str = "GET") -> tuple[int, str, bytes]:
    def fetch() -> tuple[int, str, bytes]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read()

    return await asyncio.to_thread(fetch)


def test_metrics_and_status_are_served() -> None:
    async def scenario(server: MetricsServer) -> None:
        assert server.port > 0
        code, kind, body = await get(server.url + "/metrics")
        assert code == 200
        assert kind.startswith("text/plain; version=")
        assert b"swarm_peer_step 0.0" in body
        code, kind, body = await get(server.url + "/status?pretty")
        assert (code, kind) == (200, "application/json; charset=utf-8")
        assert json.loads(body) == {"state": "online", "loss": None, "bytes": {"up": {"forward": 3}}}
        assert await get(server.url + "/status", "HEAD") == (200, "application/json; charset=utf-8", b"")
        assert (await get(server.url + "/elsewhere"))[0] == 404
        assert (await get(server.url + "/metrics", "POST"))[0] == 405

    serving(scenario, {"state": "online", "loss": float("nan"), "bytes": {"up": {"forward": 3}}})


def test_a_failing_status_answers_500_and_the_server_lives() -> None:
    async def scenario() -> None:
        def status() -> dict[str, Any]:
            raise RuntimeError("broken")

        server = await MetricsServer.start("127.0.0.1", 0, Metrics(Traffic()).registry, status)
        assert (await get(server.url + "/status"))[0] == 500
        assert (await get(server.url + "/metrics"))[0] == 200
        await server.close()

    asyncio.run(scenario())


def test_rubbish_and_silence_do_not_disturb_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE_S", 0.3)
    monkeypatch.setattr(metrics_server, "CONNECTIONS", 4)

    async def ask(server: MetricsServer, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(data)
        answer = await reader.read()
        writer.close()
        return answer

    async def scenario(server: MetricsServer) -> None:
        assert (await ask(server, b"\x16\x03\x01\x00\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert (await ask(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 9_000)).startswith(b"HTTP/1.1 400")
        assert await ask(server, b"GET / HT") == b""  # never finished: dropped after the deadline
        silent = [await asyncio.open_connection(server.host, server.port) for _ in range(4)]
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionError):
            await ask(server, b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.4)
        assert (await ask(server, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")
        for _, writer in silent:
            writer.close()

    serving(scenario)


def test_a_taken_port_is_named() -> None:
    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(UserError, match=rf"--metrics-port {port} on 127.0.0.1 is taken"):
                await MetricsServer.start("127.0.0.1", port, Metrics(Traffic()).registry, dict)
        with pytest.raises(UserError, match=r"--metrics-host 192\.0\.2\.1 is no address of this machine"):
            await MetricsServer.start("192.0.2.1", 0, Metrics(Traffic()).registry, dict)

    asyncio.run(scenario())
