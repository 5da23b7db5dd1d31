"""One peer's figures, gathered once: for the live line, `/status`, the record on the noticeboard, the summary."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import psutil

from dht.records import Role
from peers.anchor_figures import AnchorFigures
from peers.engine import Engine, JobPriority
from peers.lifecycle import Lifecycle
from peers.links import Links
from peers.metrics import Metrics, Work
from peers.priors import Priors
from peers.traffic import Traffic
from peers.trainer import Trainer
from swarm.manifest import RunManifest

WORK: Mapping[JobPriority, Work] = {
    JobPriority.FORWARD: "forward",
    JobPriority.BACKWARD: "backward",
    JobPriority.ROUND: "round",
}


class StatusBoard:
    """Reads the peer's parts when somebody asks, and keeps the metrics up to date with them."""

    def __init__(self, lifecycle: Lifecycle, traffic: Traffic, metrics: Metrics, engine: Engine) -> None:
        self.trainer: Trainer | None = None
        self.links: Links | None = None
        self.is_finished = False
        self.anchor: AnchorFigures | None = None
        self.priors: Priors | None = None
        self._role: Role = "seed"
        self._stage: int | None = None
        self._lifecycle = lifecycle
        self._traffic, self._metrics, self._engine = traffic, metrics, engine
        self._process = psutil.Process()
        self._started = time.monotonic()
        self._peer_id, self._metrics_url = "", ""
        self._manifest: RunManifest | None = None
        self._counted: dict[str, float] = {}
        self._rates: tuple[float, float] = (0.0, 0.0)
        self._rates_at = 0.0

    def identify(
        self, peer_id: str, role: Role, stage: int | None, manifest: RunManifest, metrics_url: str
    ) -> None:
        """The run is known, and the stage to hold (None for a seed and for an anchor)."""
        self._role, self._stage = role, stage
        self._peer_id, self._manifest, self._metrics_url = peer_id, manifest, metrics_url
        self._metrics.total_steps.set(manifest.total_steps)

    def snapshot(self) -> dict[str, Any]:
        """The figures now, as plain JSON values."""
        trainer, manifest = self.trainer, self._manifest
        if time.monotonic() - self._rates_at > 0.5:
            self._rates, self._rates_at = self._traffic.rates_mbps(), time.monotonic()
        up, down = self._rates
        counters = trainer.worker.core.counters if trainer else {}
        progress = trainer.progress if trainer else None
        rounds_failed = sum(trainer.averaging.core.failures.values()) if trainer else 0
        status: dict[str, Any] = {
            "peer_id": self._peer_id,
            "run_id": manifest.run_id if manifest else None,
            "run_name": manifest.name if manifest else None,
            "role": self._role,
            "stage": self._stage,
            "stages": manifest.model.stages if manifest else None,
            "state": self._lifecycle.state,
            "is_finished": self.is_finished,
            "step": trainer.version if trainer else 0,
            "total_steps": manifest.total_steps if manifest else None,
            "loss": progress.loss if progress else None,
            "tokens_per_s": progress.tokens_per_s if progress else None,
            "upload_mbps": round(up, 3),
            "download_mbps": round(down, 3),
            "standing": trainer.membership.standing.value if trainer else None,
            "stage_refills": trainer.membership.refills if trainer else 0,
            "microbatches_lost": progress.lost if progress else 0,
            "anchor": dataclasses.asdict(self.anchor) if self.anchor else None,
            "priors": self.priors.status() if self.priors else None,
            "neighbours": len(self.links.open_links()) if self.links else 0,
            "microbatches_done": counters.get("done", 0),
            "microbatches_replayed": counters.get("replayed", 0),
            "microbatches_duplicate": counters.get("duplicate_gradient", 0)
            + counters.get("repeated_forward", 0),
            "frames_refused": sum(self._traffic.refused.values()),
            "rounds_failed": rounds_failed,
            "round_seconds": trainer.averaging.seconds if trainer else None,
            "contributions_refused": dict(trainer.averaging.parts_refused) if trainer else {},
            "contributions_refused_own": trainer.averaging.own_parts_refused if trainer else 0,
            "averages_overlapped": dict(trainer.averaging.overlapped) if trainer else {},
            "bytes": self._bytes(),
            "codec_bytes": dict(trainer.worker.codec_bytes) if trainer else {},
            "rss_bytes": self._process.memory_info().rss,
            "busy_s": round(self._engine.busy_s, 3),
            "idle_s": round(self._engine.idle_s, 3),
            "tokens_done": progress.tokens_done if progress else 0,
            "seconds": round(time.monotonic() - self._started, 3),
            "metrics_url": self._metrics_url,
        }
        self._update_metrics(status)
        return status

    def summary(self, exit_reason: str) -> dict[str, Any]:
        """The last figures and why the peer ended."""
        return {**self.snapshot(), "exit_reason": exit_reason}

    def _bytes(self) -> dict[str, dict[str, int]]:
        totals: dict[str, dict[str, int]] = {"up": {}, "down": {}}
        for (direction, kind, _), count in self._traffic.bytes.items():
            totals[direction][str(kind)] = totals[direction].get(str(kind), 0) + count
        return totals

    def _update_metrics(self, status: dict[str, Any]) -> None:
        metrics, trainer = self._metrics, self.trainer
        metrics.state.state(status["state"])
        metrics.step.set(status["step"])
        if status["loss"] is not None:
            metrics.loss.set(status["loss"])
        if status["tokens_per_s"] is not None:
            metrics.tokens_per_second.set(status["tokens_per_s"])
        metrics.queue_depth("jobs", self._engine.depth)
        for priority, seconds in self._engine.worked_s.items():
            work: Work = WORK[priority]
            metrics.worked(work, self._grown(f"worked/{work}", seconds))
        metrics.idled(self._grown("idle", self._engine.idle_s))
        metrics.tokens.inc(self._grown("tokens", status["tokens_done"]))
        metrics.microbatch("done", int(self._grown("done", status["microbatches_done"])))
        metrics.microbatch("replayed", int(self._grown("replayed", status["microbatches_replayed"])))
        metrics.microbatch("lost", int(self._grown("lost", status["microbatches_lost"])))
        metrics.microbatch("duplicate", int(self._grown("duplicate", status["microbatches_duplicate"])))
        if status["anchor"] is not None:
            metrics.corrector.take_anchor(status["anchor"])
        if trainer is None:
            return
        metrics.queue_depth("microbatches", trainer.worker.core.in_flight)
        if trainer.progress.gradient_norm is not None:
            metrics.gradient_norm.set(trainer.progress.gradient_norm)
        if status["priors"] is not None:
            self._prior_metrics(metrics, status["priors"], trainer.version)
        metrics.compression("averaging", trainer.averaging.work.compression)
        outcomes = trainer.averaging.outcomes
        for _ in range(int(self._grown("committed", outcomes["committed"]))):
            metrics.round("committed", trainer.averaging.seconds)
        for reason, count in (trainer.averaging.core.failures + trainer.averaging.refusals).items():
            for _ in range(int(self._grown(f"failed/{reason}", count))):
                metrics.round("failed", trainer.averaging.seconds, reason)
        for reason, count in trainer.averaging.parts_refused.items():
            metrics.contributions_refused.labels(reason).inc(self._grown(f"contribution/{reason}", count))
        for result, count in trainer.averaging.overlapped.items():
            metrics.averages_overlapped.labels(result).inc(self._grown(f"overlapped/{result}", count))
        refused = sum(n for name, n in trainer.worker.core.counters.items() if name.startswith("refused_"))
        metrics.microbatch("refused", int(self._grown("refused", refused)))
        if self._manifest is not None:
            self._compression(metrics, trainer.worker.codec_bytes, self._manifest.model.hidden_size)

    def _prior_metrics(self, metrics: Metrics, priors: dict[str, Any], step: int) -> None:
        if priors["corrector"] is not None:
            metrics.corrector.take(priors["corrector"], priors["in_force"]["corrector"]["version"], step)
        metrics.prior_share.set(priors["traffic_share"])
        for boundary, ref in priors["in_force"].items():
            if boundary == "corrector":
                continue
            metrics.prior_version.labels(boundary).set(ref["version"])
            if ref["step"] is not None:
                metrics.prior_age.labels(boundary).set(max(0, step - ref["step"]))
        for name, count in {**priors["counters"], **priors["offers"]}.items():
            grown = self._grown(f"prior/{name}", count)
            metrics.priors.labels(name.removeprefix("refused_")).inc(grown)
        metrics.prior_bytes.inc(self._grown("prior_bytes", priors["bytes"]))
        metrics.prior_wait.inc(self._grown("prior_wait", priors["waited_s"]))

    def _compression(self, metrics: Metrics, sent: dict[str, int], hidden_size: int) -> None:
        forward = sent["forward"] + sent["dense_positions"] + sent["ids"]
        if forward:
            metrics.compression("forward", 2 * hidden_size * sent["tokens"] / forward)
        if sent["gradient"]:
            metrics.compression("gradient", 2 * hidden_size * sent["gradient_tokens"] / sent["gradient"])

    def _grown(self, name: str, value: float) -> float:
        """By how much a counter has grown since it was last looked at."""
        before = self._counted.get(name, 0.0)
        self._counted[name] = value
        return max(0.0, value - before)
