"""Every metric of a peer, declared once: name, help, unit, labels and all the values a label may take.

Names begin with `swarm_peer_`, units are base units (bytes, seconds, ratios), labels come from bounded sets, so
that a remote peer can never make a new series. Bytes are not counted here: they are read from `Traffic`, where
they are counted once, when somebody looks. All of it is used from the communication loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import psutil
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from peers.corrector_metrics import CorrectorMetrics
from peers.frames import Kind
from peers.link import Link
from peers.traffic import Direction, Traffic
from swarm.gradient.robust import Refusal

State = Literal["joining", "syncing", "online", "draining", "offline"]
Outcome = Literal["done", "replayed", "refused", "duplicate", "lost"]
Work = Literal["forward", "backward", "round"]
Queue = Literal["jobs", "microbatches"]
RoundResult = Literal["committed", "failed"]
RoundReason = Literal[
    "none",
    "late",
    "key",
    "weight",
    "digest",
    "disconnected",
    "not_finite",
    "sketch",
    "alone",
    "schema",
    "stranger",
    "other",
]
Way = Literal["forward", "gradient", "averaging"]
CheckpointResult = Literal["written", "failed", "corrupt"]
UpdateResult = Literal["written", "failed", "skipped", "corrupt", "applied"]

REFUSAL_REASONS = (
    "oversize",
    "header",
    "kind",
    "range",
    "size",
    "hello",
    "batch",
    "key",
    "stage",
    "start",
    "stranger",
    "early",
    "slow",
    "plan",
    "step",
    "assign",
    "not_finite",
    "weight",
    "other",
)
"""Labels of refused frames; a reason outside of them is counted as "other"."""
WAITING = {"gradient": 1, "activation": 2, "averaging": 3, "state": 4}
"""Label and number of every priority that waits in a shaper (`peers.frames.Priority`)."""
LAG_INTERVAL_S = 0.5
LAG_WINDOW_S = 60.0
_ROUND_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_STAGES = 1024


PRIOR_RESULTS = (
    "fetched",
    "hash",
    "file",
    "arrays",
    "publisher",
    "disk",
    "stranger",
    "part",
    "size",
    "conflict",
)
OVERLAP_RESULTS = ("arrived", "again")


class Metrics:
    """The metrics of one peer, on a registry of their own.

    traffic: where bytes, frames and refusals are read from at every scrape.
    """

    def __init__(self, traffic: Traffic) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every counter helps nobody
        registry = self.registry = CollectorRegistry()
        self.state = Enum(
            "swarm_peer_state", "State of this peer", states=list(get_args(State)), registry=registry
        )
        self.step = Gauge("swarm_peer_step", "Step this peer works on", registry=registry)
        self.total_steps = Gauge("swarm_peer_total_steps", "Steps of the run", registry=registry)
        self.loss = Gauge("swarm_peer_loss", "Mean token loss of the last step, in nats", registry=registry)
        self.gradient_norm = Gauge(
            "swarm_peer_gradient_norm",
            "Norm of this stage's averaged gradient before clipping",
            registry=registry,
        )
        self.tokens = Counter("swarm_peer_tokens", "Tokens of committed steps", registry=registry)
        self.tokens_per_second = Gauge(
            "swarm_peer_tokens_per_second", "Tokens of the run per second, lately", registry=registry
        )
        self._microbatches = Counter(
            "swarm_peer_microbatches", "Microbatches by what became of them", ["outcome"], registry=registry
        )
        self._rounds = Counter(
            "swarm_peer_rounds",
            "Averaging rounds by result and reason",
            ["result", "reason"],
            registry=registry,
        )
        self._round_seconds = Histogram(
            "swarm_peer_round_seconds",
            "Duration of an averaging round in seconds",
            ["result"],
            buckets=_ROUND_BUCKETS,
            registry=registry,
        )
        self._work_seconds = Counter(
            "swarm_peer_compute_seconds",
            "Seconds of the compute thread at work: forwards and backwards with their coding; round: averages, the "
            "optimizer's step, whole states, and an anchor's passes",
            ["work"],
            registry=registry,
        )
        self._idle_seconds = Counter(
            "swarm_peer_idle_seconds", "Seconds the stage had nothing to compute", registry=registry
        )
        self._queue_depth = Gauge(
            "swarm_peer_queue_depth",
            "Jobs that wait for the compute thread, and microbatches that are held and not done",
            ["queue"],
            registry=registry,
        )
        self._compression = Gauge(
            "swarm_peer_compression_ratio",
            "Bytes of the uncompressed bf16 values over bytes sent",
            ["way"],
            registry=registry,
        )
        self._checkpoints = Counter(
            "swarm_peer_checkpoints", "Checkpoints by what became of them", ["result"], registry=registry
        )
        self._updates = Counter(
            "swarm_peer_updates",
            "Updates (committed steps kept for those who catch up) by what became of them",
            ["result"],
            registry=registry,
        )
        self._loop_lag = Histogram(
            "swarm_peer_loop_lag_seconds",
            "How late the communication loop woke up, in seconds",
            buckets=_LAG_BUCKETS,
            registry=registry,
        )
        self.loop_lag_max = Gauge(
            "swarm_peer_loop_lag_recent_max_seconds",
            "Latest that the communication loop woke up within the last minute, in seconds",
            registry=registry,
        )
        self.prior_version = Gauge(
            "swarm_peer_prior_version",
            "How often the prior in force at a boundary of this peer has changed",
            ["boundary"],
            registry=registry,
        )
        self.prior_age = Gauge(
            "swarm_peer_prior_age_steps",
            "Steps since the weights to which the prior in force was fitted",
            ["boundary"],
            registry=registry,
        )
        self.priors = Counter(
            "swarm_peer_priors",
            "Priors by what became of them: fetched, conflict, or why they were refused",
            ["result"],
            registry=registry,
        )
        self.contributions_refused = Counter(
            "swarm_peer_contributions_refused",
            "Chunks of members' contributions that this peer, as their reducer, left out of an average",
            ["reason"],
            registry=registry,
        )
        self.averages_overlapped = Counter(
            "swarm_peer_averages_overlapped",
            "Averages of an earlier step that were applied: arrived while steps ran, or exchanged again in the open",
            ["result"],
            registry=registry,
        )
        self.prior_bytes = Counter(
            "swarm_peer_prior_bytes", "Bytes of priors that were fetched", registry=registry
        )
        self.prior_wait = Counter(
            "swarm_peer_prior_wait_seconds",
            "Time in which the plan in force named a prior that was not here, in seconds",
            registry=registry,
        )
        self.prior_share = Gauge(
            "swarm_peer_prior_traffic_share",
            "Bytes of priors fetched over bytes of FORWARD and GRADIENT frames received",
            registry=registry,
        )
        self.corrector = CorrectorMetrics(registry)
        self.host_restarts = Counter(
            "swarm_peer_host_restarts",
            "Deaths of the libp2p daemon, each followed by a restart",
            registry=registry,
        )
        self.known_peers = Gauge(
            "swarm_peer_known_peers",
            "Live peers of the run on the noticeboard, this one included",
            registry=registry,
        )
        self._declare_series()
        self.links: Iterable[Link] = ()
        registry.register(_TrafficCollector(traffic))
        registry.register(_PeerCollector(self))

    def _declare_series(self) -> None:
        """Bring every series to life at 0: a rate over a series that appears later misses its first event."""
        for outcome in get_args(Outcome):
            self._microbatches.labels(outcome)
        for work in get_args(Work):
            self._work_seconds.labels(work)
        for queue in get_args(Queue):
            self._queue_depth.labels(queue)
        for result in get_args(CheckpointResult):
            self._checkpoints.labels(result)
        for what in get_args(UpdateResult):
            self._updates.labels(what)
        for result in PRIOR_RESULTS:
            self.priors.labels(result)
        for result in OVERLAP_RESULTS:
            self.averages_overlapped.labels(result)
        for refusal in get_args(Refusal):
            self.contributions_refused.labels(refusal)
        self._rounds.labels("committed", "none")
        for reason in get_args(RoundReason):
            if reason != "none":
                self._rounds.labels("failed", reason)

    def microbatch(self, outcome: Outcome, count: int = 1) -> None:
        """Count microbatches."""
        self._microbatches.labels(_one_of(outcome, get_args(Outcome))).inc(count)

    def round(self, result: RoundResult, seconds: float, reason: str = "none") -> None:
        """Count a round. reason: of a failure; one that is not known is counted as "other"."""
        if result == "committed":
            reason = "none"
        elif reason not in get_args(RoundReason) or reason == "none":
            reason = "other"
        self._rounds.labels(_one_of(result, get_args(RoundResult)), reason).inc()
        self._round_seconds.labels(result).observe(max(0.0, seconds))

    def worked(self, work: Work, seconds: float) -> None:
        """Add time spent computing."""
        self._work_seconds.labels(_one_of(work, get_args(Work))).inc(max(0.0, seconds))

    def idled(self, seconds: float) -> None:
        """Add time in which the stage had nothing to compute."""
        self._idle_seconds.inc(max(0.0, seconds))

    def queue_depth(self, queue: Queue, entries: int) -> None:
        """Set the entries waiting in a queue."""
        self._queue_depth.labels(_one_of(queue, get_args(Queue))).set(entries)

    def compression(self, way: Way, ratio: float) -> None:
        """Set uncompressed bf16 bytes over sent bytes."""
        self._compression.labels(_one_of(way, get_args(Way))).set(ratio)

    def checkpoint(self, result: CheckpointResult, count: int = 1) -> None:
        """Count checkpoints."""
        self._checkpoints.labels(_one_of(result, get_args(CheckpointResult))).inc(count)

    def update(self, result: UpdateResult, count: int = 1) -> None:
        """Count updates."""
        self._updates.labels(_one_of(result, get_args(UpdateResult))).inc(count)

    async def watch_loop(self, interval_s: float = LAG_INTERVAL_S) -> None:
        """Measure how late the loop wakes up, for ever; a task of the peer's group runs it."""
        recent: deque[float] = deque(maxlen=max(1, round(LAG_WINDOW_S / interval_s)))
        while True:
            due = time.monotonic() + interval_s
            await asyncio.sleep(interval_s)
            recent.append(max(0.0, time.monotonic() - due))
            self._loop_lag.observe(recent[-1])
            self.loop_lag_max.set(max(recent))


def _one_of(value: str, known: tuple[str, ...]) -> str:
    """The value, which our own code must have taken from the known ones. Raises ValueError."""
    if value not in known:
        raise ValueError(f"label {value!r} is none of {', '.join(known)}")
    return value


def stage_label(stage: int) -> str:
    """Label of a neighbour's stage; whoever holds no stage (a seed, a fetching peer) is "none"."""
    return str(stage) if 0 <= stage < _STAGES else "none"


class _TrafficCollector(Collector):
    """Bytes, frames and refusals, read from Traffic at every scrape."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        """The families, as prometheus_client wants them."""
        nbytes = CounterMetricFamily(
            "swarm_peer_bytes",
            "Bytes of frames (headers and payloads) by direction, kind of frame and stage of the neighbour",
            labels=["direction", "kind", "neighbour_stage"],
        )
        totals: dict[tuple[str, str, str], int] = {}
        for (way, name, stage), count in list(self._traffic.bytes.items()):
            key = (way, name, stage_label(stage))
            totals[key] = totals.get(key, 0) + count
        for labels, count in sorted(totals.items()):
            nbytes.add_metric(labels, count)
        yield nbytes
        frames = CounterMetricFamily(
            "swarm_peer_frames", "Frames by direction and kind", labels=["direction", "kind"]
        )
        counted = dict(self._traffic.frames)
        directions: tuple[Direction, ...] = get_args(Direction)
        for direction in directions:
            for kind in Kind:
                frames.add_metric((direction, kind.value), counted.get((direction, kind.value), 0))
        yield frames
        refused = CounterMetricFamily(
            "swarm_peer_frames_refused", "Frames refused, by reason", labels=["reason"]
        )
        reasons = dict.fromkeys(REFUSAL_REASONS, 0)
        for reason, count in self._traffic.refused.items():
            reasons[reason if reason in reasons else "other"] += count
        for reason, count in reasons.items():
            refused.add_metric((reason,), count)
        yield refused
        yield from self._shapers()

    def _shapers(self) -> Iterator[Metric]:
        """What the caps are, and how long frames waited because of them."""
        waits = CounterMetricFamily(
            "swarm_peer_shaper_wait_seconds",
            "Seconds that pieces of frames waited for their turn under a cap",
            labels=["direction", "priority"],
        )
        cap = GaugeMetricFamily(
            "swarm_peer_cap_bytes_per_second", "The volunteer's cap, if there is one", labels=["direction"]
        )
        directions: tuple[Direction, ...] = get_args(Direction)
        for direction in directions:
            shaper = self._traffic.shaper(direction)
            for name, priority in WAITING.items():
                waits.add_metric((direction, name), shaper.waited_s[priority])
            if shaper.limit_mbps is not None:
                cap.add_metric((direction,), shaper.limit_mbps * 1e6 / 8)
        yield waits
        yield cap


class _PeerCollector(Collector):
    """What is looked up when somebody asks: links and memory."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        """The families, as prometheus_client wants them."""
        count = GaugeMetricFamily(
            "swarm_peer_links", "Open links by stage of the neighbour", labels=["neighbour_stage"]
        )
        slowest = GaugeMetricFamily(
            "swarm_peer_link_rtt_seconds",
            "Round trip of the slowest link to a stage's peers, in seconds",
            labels=["neighbour_stage"],
        )
        links: dict[str, list[float | None]] = {}
        for link in self._metrics.links:
            links.setdefault(stage_label(link.hello.stage), []).append(link.rtt_s)
        for stage, times in sorted(links.items()):
            count.add_metric((stage,), len(times))
            if known := [value for value in times if value is not None]:
                slowest.add_metric((stage,), max(known))
        yield count
        yield slowest
        memory = GaugeMetricFamily(
            "swarm_peer_resident_memory_bytes", "Memory of this process in RAM, in bytes"
        )
        memory.add_metric((), self._process.memory_info().rss)
        yield memory
