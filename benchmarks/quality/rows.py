"""The rows of the table, declared as data, and the groups they are run in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.quality.config import AnchorPlan, RowConfig

Family = Literal["dense", "mask", "basis-80", "basis-90", "basis-95"]
"""Whose tuned learning rate a row takes: codec basis of other mask ratios that of the nearest one."""

LEARNING_RATES = (1.5e-4, 3e-4, 6e-4)
"""What `--group tune` tries; the second is the one of docs/method.md, which all rows take unless told otherwise."""

SCHEDULE = AnchorPlan(early_snapshots=(2, 5, 10, 15, 30), lateness=5)
"""Snapshots as a run's manifest has them by default: at 2, 5, 10, 15, 30 and every 20 steps. Priors are in force 5
steps later: a pass, the fit and the transfers take two or three steps of 16,384 tokens on the machines and lines that
runs are made for. `benchmarks/anchors.py --steps 500` says what share of the traffic this schedule makes."""

PAPER_SCHEDULE = AnchorPlan()
"""For the paper's corrector: snapshots at 5, 10 and every K = 20 steps, in force one interval later."""

BASIS_REVISION = 4
"""Of codec basis; raised when equal options code otherwise, so that its rows are run again. 2: trellis-coded; 3: single
outlier values, constant levels; 4: int8 matrices in priors."""

NO_FADING = 80
"""max_staleness of the paper's corrector: a memory that is one interval late (up to 2 K steps old) counts in full."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row. says: what it is, printed with it. step_share: of the group's steps that it trains.

    options: further fields of RowConfig.
    """

    name: str
    says: str
    family: Family
    codec: Mapping[str, Any]
    corrector: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    anchors: AnchorPlan | None = None
    dense_every: int = 0
    step_share: float = 1.0
    learning_rate: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _dense(name: str = "dense", says: str = "everything crosses the boundaries, as bf16", **more: Any) -> Row:
    return Row(name, says, "dense", {"name": "dense"}, **more)


def _mask(ratio: float, name: str = "", says: str = "", **more: Any) -> Row:
    return Row(
        name or f"mask-{ratio:g}",
        says or f"random mask, {100 - ratio:g}% of the coordinates sent, the rest zero",
        "mask",
        {"name": "mask", "mask_ratio": ratio},
        **more,
    )


def _spectral(**changes: Any) -> dict[str, Any]:
    """The paper's corrector, and what of it a row changes."""
    paper = {"alpha": 0.3, "tau": 1e-3, "rank": 64, "ema_beta": 0.95, "max_staleness": NO_FADING}
    return {"name": "spectral", **paper, **changes}


def _mask_corrected(ratio: float, name: str = "", says: str = "", **changes: Any) -> Row:
    return _mask(
        ratio,
        name or f"mask-{ratio:g}-spectral",
        says or f"random mask at {ratio:g}% with the paper's corrector: alpha 0.3, tau 1e-3, K 20, beta 0.95",
        corrector=_spectral(**changes),
        anchors=PAPER_SCHEDULE,
    )


def _basis(
    ratio: float,
    name: str = "",
    says: str = "",
    *,
    anchors: AnchorPlan | None = SCHEDULE,
    codec: Mapping[str, Any] | None = None,
    **more: Any,
) -> Row:
    return Row(
        name or f"basis-{ratio:g}",
        says
        or f"prior-coded, {100 - ratio:g}% of the bytes, predicted from token ids, anchors' priors 5 steps late",
        "basis-80" if ratio < 85 else "basis-90" if ratio < 93 else "basis-95",
        {"name": "basis", "mask_ratio": ratio, "prediction": "context", **(codec or {})},
        anchors=anchors,
        **more,
    )


def _corrected_basis(name: str, says: str, **config: Any) -> Row:
    return _basis(
        95,
        f"basis-95-{name}",
        f"basis at 95% with corrector {says}",
        corrector={"name": name, "max_staleness": NO_FADING, **config},
    )


def _tuned(row: Row, rate: float) -> Row:
    return Row(
        f"{row.name}-lr{rate:g}",
        f"{row.says}; learning rate {rate:g}",
        row.family,
        row.codec,
        row.corrector,
        row.anchors,
        learning_rate=rate,
    )


DENSE, MASK_95, BASIS_80, BASIS_90, BASIS_95 = _dense(), _mask(95), _basis(80), _basis(90), _basis(95)

MAIN = (DENSE, BASIS_80, BASIS_90, BASIS_95, MASK_95, _mask_corrected(95))

TUNE = tuple(
    _tuned(row, rate) for rate in LEARNING_RATES for row in (DENSE, MASK_95, BASIS_95, BASIS_90, BASIS_80)
)

CORE = (
    *(row for ratio in (90, 95, 99) for row in (_mask(ratio), _mask_corrected(ratio))),
    *(_basis(ratio) for ratio in (80, 90, 95, 98, 99)),
)
"""The paper's rows and the codec's, at every ratio."""

PREDICTION = tuple(
    _basis(
        ratio,
        f"basis-{ratio}-{prediction}",
        f"basis at {ratio}%, {says}",
        codec={"prediction": prediction},
    )
    for prediction, says in (
        ("none", "nothing predicted"),
        ("token", "predicted from the token itself alone"),
    )
    for ratio in (90, 95)
)

CORRECTORS = (
    _corrected_basis("spectral", "spectral (the paper's)", tau=1e-3),
    _corrected_basis("one_sided", "one_sided: filters the shorter side only"),
    _corrected_basis("signed", "signed: raw sizes, the memory's signs"),
    _corrected_basis("bias", "bias: adds the anchors' dense less coded gradient", alpha=0.0),
    _corrected_basis("additive", "additive: 5% of the memory mixed in"),
)

BASELINES = (
    _dense(
        "dense-10%-steps",
        "dense with a tenth of the steps (own cosine): the bytes of basis 90",
        step_share=0.1,
    ),
    _dense(
        "dense-5%-steps",
        "dense with a twentieth of the steps (own cosine): the bytes of basis 95",
        step_share=0.05,
    ),
    _basis(
        95, "basis-95-dense20", "basis at 95%, every 20th step dense: the bytes of basis 90", dense_every=20
    ),
    _basis(
        90,
        "basis-90-half-steps",
        "basis at 90% with half of the steps: the bytes of basis 95",
        step_share=0.5,
    ),
)

STALENESS = tuple(
    _basis(
        95,
        f"basis-95-K{every}",
        f"basis at 95%, a snapshot every {every} steps and no early ones, priors in force 5 steps later",
        anchors=AnchorPlan(snapshot_every=every, early_snapshots=(), lateness=5),
    )
    for every in (10, 20, 30, 50)
)

TABLE_2 = (
    *(
        _mask_corrected(95, f"mask-95-tau{tau:g}", f"mask 95, paper's corrector with tau {tau:g}", tau=tau)
        for tau in (1e-5, 1e-4, 1e-1)
    ),
    *(
        _mask_corrected(
            95, f"mask-95-alpha{alpha:g}", f"mask 95, paper's corrector with alpha {alpha:g}", alpha=alpha
        )
        for alpha in (0.0, 0.5, 0.7)
    ),
    *(
        _mask_corrected(
            95, f"mask-95-beta{beta:g}", f"mask 95, paper's corrector with EMA beta {beta:g}", ema_beta=beta
        )
        for beta in (0.5, 0.9, 0.99)
    ),
)

REFRESH = tuple(
    _basis(95, f"basis-95-{name}", f"basis at 95%, {says}", anchors=plan)
    for name, says, plan in (
        ("initial", "the initial priors for the whole run", None),
        ("interval", "snapshots at 5, 10 and every 20 steps, one interval late", PAPER_SCHEDULE),
        ("every20", "a snapshot every 20 steps, one interval late", AnchorPlan(early_snapshots=())),
        (
            "every20-prompt",
            "a snapshot every 20 steps, 5 steps late",
            AnchorPlan(early_snapshots=(), lateness=5),
        ),
        (
            "every5",
            "a snapshot every 5 steps, one interval late",
            AnchorPlan(snapshot_every=5, early_snapshots=()),
        ),
        (
            "early",
            "snapshots at 2, 4, 6, 9, 13, 18, 25 and every 20 steps, one interval late",
            AnchorPlan(early_snapshots=(2, 4, 6, 9, 13, 18, 25)),
        ),
        ("prompt", "the usual snapshots, 2 steps late", SCHEDULE.model_copy(update={"lateness": 2})),
    )
)

LEADERS = tuple(
    _basis(
        ratio,
        f"basis-{ratio}-leaders",
        f"basis at {ratio}%, no anchors: the stages' peers make priors every 5 steps, in force 2 steps later",
        anchors=AnchorPlan(source="leaders", snapshot_every=5, early_snapshots=(), lateness=2),
    )
    for ratio in (90, 95)
)

SWEEPS = (DENSE, *CORE, *PREDICTION, *CORRECTORS, *BASELINES, *TABLE_2, *REFRESH, *LEADERS)

QUICK_OPTIONS = {
    "max_tokens": 120_000,
    "samples_per_step": 4,
    "rows_per_microbatch": 4,
    "eval_rows": 16,
    "eval_every": 8,
    "warmup_steps": 2,
}


def _quick(row: Row) -> Row:
    codec = dict(row.codec)
    if codec["name"] == "basis":
        codec |= {"calibration_microbatches": 16, "calibration_tokens": 8192}
    anchors = AnchorPlan(microbatches=4, early_snapshots=(3, 6, 10)) if row.anchors is not None else None
    return Row(row.name, row.says, row.family, codec, row.corrector, anchors, options=QUICK_OPTIONS)


QUICK = tuple(_quick(row) for row in (DENSE, BASIS_90, MASK_95))


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are run together: on which domains, with which seeds, for how many steps."""

    rows: tuple[Row, ...]
    domains: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    says: str


GROUPS = {
    "main": Group(MAIN, ("manpages-de",), (0, 1), 80, "the main rows, two seeds"),
    "tune": Group(TUNE, ("manpages-de",), (0,), 40, "three learning rates"),
    "sweeps": Group(SWEEPS, ("manpages-de",), (0,), 40, "every kind of row, shorter"),
    "prediction": Group(
        (DENSE, *PREDICTION), ("manpages-de",), (0,), 80, "what prediction from token ids is worth"
    ),
    "staleness": Group(
        (DENSE, *STALENESS), ("manpages-de",), (0,), 80, "refresh interval K at equal lateness"
    ),
    "domains": Group((DENSE, BASIS_90, BASIS_95), ("perl", "c-headers"), (0,), 80, "other domains"),
    "quick": Group(QUICK, ("python",), (0,), 16, "minutes: three rows on the standard library's sources"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One row-run to be: which row, of which group, its whole configuration, and that of the dense row beside it."""

    group: str
    row: Row
    config: RowConfig
    reference: RowConfig


def entry(
    group: str, row: Row, domain: str, seed: int, steps: int, rates: Mapping[Family, float], **fields: Any
) -> Entry:
    """The run of a row. rates: learning rate of each family, for rows without one of their own.

    fields: of RowConfig, over the row's own options.
    """

    def config_of(which: Row) -> RowConfig:
        taken = max(1, round(steps * which.step_share))
        return RowConfig(
            domain=domain,
            seed=seed,
            steps=taken,
            codec=dict(which.codec),
            corrector=dict(which.corrector),
            anchors=which.anchors,
            dense_every=which.dense_every,
            revision=BASIS_REVISION if which.codec["name"] == "basis" else 0,
            learning_rate=which.learning_rate or rates[which.family],
            **{"warmup_steps": min(8, max(1, taken // 5)), **which.options, **fields},
        )

    dense = replace(DENSE, learning_rate=row.learning_rate, options=row.options)
    return Entry(group, row, config_of(row), config_of(dense))


def changed(row: Row, codec: Mapping[str, Any], anchors: Mapping[str, Any]) -> Row:
    """A row with `basis` and anchors' plan changed, named after what differs; others as they are.

    Raises ValidationError for a plan with such a field.
    """
    has_plan, is_basis = row.anchors is not None, row.codec["name"] == "basis"
    changes = {**(codec if is_basis else {}), **(anchors if has_plan else {})}
    if not changes:
        return row
    plan = AnchorPlan.model_validate({**row.anchors.model_dump(), **anchors}) if row.anchors else None
    shown = ",".join(f"{name}={str(value).replace(' ', '')}" for name, value in changes.items())
    return replace(
        row,
        name=f"{row.name}+{shown}",
        says=f"{row.says}; {shown}",
        codec={**row.codec, **codec} if is_basis else row.codec,
        anchors=plan,
    )


def entries(
    groups: tuple[str, ...],
    rates: Mapping[Family, float],
    *,
    only: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (),
    steps: int | None = None,
    domains: tuple[str, ...] = (),
    codec: Mapping[str, Any] | None = None,
    anchors: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Iterator[Entry]:
    """The runs of these groups, seed by seed, each configuration once. The options replace the groups' own.

    only: names of rows; the others are left out. codec: options of `basis`, for all rows that have it; anchors: of
    their plan. fields: of RowConfig, for all rows.
    """
    seen: set[str] = set()
    for name in groups:
        group = GROUPS[name]
        for domain in domains or group.domains:
            for seed in seeds or group.seeds:
                for declared in group.rows:
                    if only and declared.name not in only:
                        continue
                    row = changed(declared, codec or {}, anchors or {})
                    found = entry(name, row, domain, seed, steps or group.steps, rates, **fields)
                    if found.config.key not in seen:
                        seen.add(found.config.key)
                        yield found
