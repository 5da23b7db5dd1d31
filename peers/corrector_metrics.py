"""Metrics of the corrector at a stage peer, and of what an anchor measures in its passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from swarm.anchor.corrector import Passed

QUANTILES = ("0", "0.25", "0.5", "0.75", "1")
OUTCOMES = ("corrected", *get_args(Passed))
"""What became of a matrix's gradient: corrected, or passed for this reason."""


class CorrectorMetrics:
    """See the module. Used from the communication loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"swarm_peer_{name}", text, list(labels), registry=registry)

        self._eta = gauge(
            "corrector_eta",
            "eta_r of the last corrected step: share of the averaged gradient's energy within the prior's bases",
        )
        self._cosine = gauge(
            "corrector_cosine", "Cosine of the corrected with the averaged gradient, last step"
        )
        self._filter_weight = gauge("corrector_filter_weight", "Mean Tikhonov weight of the prior in use")
        self._weight = gauge("corrector_weight", "What staleness leaves of the correction, 0 to 1")
        self._version = gauge(
            "corrector_prior_version", "How often the corrector's prior in force has changed"
        )
        self._age = gauge(
            "corrector_prior_age_steps", "Steps since the weights behind the prior of the last corrected step"
        )
        self._singular_values = gauge(
            "corrector_singular_value", "Quantiles of the singular values of the prior in use", "quantile"
        )
        self._seconds = gauge("corrector_seconds", "Seconds that correcting the last step took")
        self._matrices = Counter(
            "swarm_peer_corrector_matrices",
            "Matrices whose gradient was corrected, or passed as it was, by reason",
            ["outcome"],
            registry=registry,
        )
        self._withheld = Counter(
            "swarm_peer_corrector_steps_withheld",
            "Steps that were not corrected because a member of the group lacked the prior of the plan",
            registry=registry,
        )
        self._coded_cosine = gauge(
            "anchor_coded_cosine", "Anchor: cosine of the coded with the dense gradient of one microbatch"
        )
        self._codec_error = gauge(
            "anchor_codec_error",
            "Anchor: relative squared error of the codec in force on that microbatch",
            "boundary",
            "direction",
        )
        self._gain = gauge(
            "anchor_corrector_cosine",
            "Anchor: cosine of a coded gradient with the clean one of other samples, raw and corrected by the last "
            "prior; the corrector helps where corrected is the larger",
            "which",
        )
        self._factor_s = gauge(
            "anchor_factor_seconds", "Anchor: seconds of the last factorisation of its memory"
        )
        self._prior_bytes = gauge(
            "anchor_prior_bytes", "Anchor: bytes of the priors of its last pass, over all parts", "kind"
        )
        for outcome in OUTCOMES:
            self._matrices.labels(outcome)
        for quantile in QUANTILES:
            self._singular_values.labels(quantile)
        self._counted: dict[str, int] = {}

    def take(self, figures: Mapping[str, Any], version: int, step: int) -> None:
        """Figures of `Corrections.status`. version: of the prior in force. step: the one in progress."""
        self._version.set(version)
        for name, count in figures["counters"].items():
            grown = count - self._counted.get(name, 0)
            self._counted[name] = count
            if name == "withheld":
                self._withheld.inc(grown)
            else:
                self._matrices.labels(name.removeprefix("passed_")).inc(grown)
        if "step" not in figures:
            return
        for gauge, name in (
            (self._eta, "eta"),
            (self._cosine, "cosine"),
            (self._filter_weight, "mean_filter_weight"),
            (self._weight, "weight"),
            (self._seconds, "seconds"),
        ):
            if figures[name] is not None:
                gauge.set(figures[name])
        if figures["prior_step"] is not None:
            self._age.set(max(0, step - figures["prior_step"]))
        for quantile, value in zip(QUANTILES, figures["singular_values"], strict=False):
            self._singular_values.labels(quantile).set(value)

    def take_anchor(self, figures: Mapping[str, Any]) -> None:
        """Figures of `AnchorFigures`."""
        if figures["coded_cosine"] is not None:
            self._coded_cosine.set(figures["coded_cosine"])
        for direction in ("forward", "gradient"):
            for boundary, error in enumerate(figures[f"{direction}_errors"]):
                self._codec_error.labels(str(boundary), direction).set(error)
        for which in ("raw", "corrected"):
            if figures[f"{which}_cosine"] is not None:
                self._gain.labels(which).set(figures[f"{which}_cosine"])
        self._factor_s.set(figures["factor_s"])
        self._prior_bytes.labels("boundary").set(figures["prior_bytes"])
        self._prior_bytes.labels("corrector").set(figures["corrector_bytes"])
