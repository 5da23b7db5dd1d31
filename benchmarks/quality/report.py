"""Tables and plots of all finished rows, as a page of the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from benchmarks.quality.config import RowConfig
from benchmarks.quality.journal import Journal
from benchmarks.quality.prediction import (
    CALIBRATED_S_PER_TOKEN,
    bytes_per_stage,
    measured_stage_s,
    step_seconds,
)
from benchmarks.quality.rows import DENSE, GROUPS, Entry, Family, Row, entries
from benchmarks.quality.runner import payload_bytes_of, share_recovered
from benchmarks.quality.tuning import learning_rates

if TYPE_CHECKING:
    from rich.console import Console

BEGIN, END = "<!-- figures: python -m benchmarks.quality report -->", "<!-- end of figures -->"
PAGE = "quality.md"

Compute = Literal["bf16", "fp32"]
Rates = Mapping[Compute, Mapping[Family, float]]
"""Learning rates of the rows that are shown in groups, by the number format of their stages."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table: all its finished seeds on one domain. Lists are in the order of `seeds`."""

    name: str
    says: str
    domain: str
    seeds: list[int]
    entries: list[Entry]
    records: list[Mapping[str, Any]]
    dense: list[Mapping[str, Any] | None]

    @property
    def shares(self) -> list[float | None]:
        """Share of the dense gain by seed; None where dense is not done."""
        return [
            None if dense is None else share_recovered(record, dense)
            for record, dense in zip(self.records, self.dense, strict=True)
        ]

    @property
    def config(self) -> RowConfig:
        """Of the first seed."""
        return self.entries[0].config


def rates_of(records: Mapping[str, Mapping[str, Any]]) -> Rates:
    """The tuned learning rates of each number format whose group `tune` is done, else the default ones."""
    found: dict[Compute, Mapping[Family, float]] = {}
    for compute in get_args(Compute):
        try:
            found[compute] = learning_rates(records, is_tuned=True, compute=compute)
        except ValueError:
            found[compute] = learning_rates(records, is_tuned=False)
    return found


def lines_of(
    group: str, records: Mapping[str, Mapping[str, Any]], rates: Mapping[Family, float], compute: Compute
) -> list[Line]:
    """The finished rows of a group, in declared order, seeds together."""
    found: dict[tuple[str, str], Line] = {}
    for each in entries((group,), rates, compute=compute):
        record = records.get(each.config.key)
        if record is None:
            continue
        place = (each.config.domain, each.row.name)
        line = found.setdefault(place, Line(each.row.name, each.row.says, each.config.domain, [], [], [], []))
        line.seeds.append(each.config.seed)
        line.entries.append(each)
        line.records.append(record)
        line.dense.append(records.get(each.reference.key))
    return list(found.values())


def other_lines(records: Mapping[str, Mapping[str, Any]], rates: Rates, known: set[str]) -> list[Line]:
    """Finished rows that no group declares: other steps, seeds or options. known: keys of those that are declared."""
    found: dict[str, Line] = {}
    for key, record in records.items():
        if key in known:
            continue
        config = RowConfig.model_validate(record["config"])
        dense = config.model_copy(
            update={
                "codec": dict(DENSE.codec),
                "corrector": dict(DENSE.corrector),
                "anchors": None,
                "dense_every": 0,
                "revision": 0,
                "learning_rate": rates[config.compute]["dense"],
            }
        )
        row = Row(record["row"], record["says"], "dense", config.codec)
        place = config.model_copy(update={"seed": 0}).canonical()
        line = found.setdefault(place, Line(row.name, row.says, config.domain, [], [], [], []))
        line.seeds.append(config.seed)
        line.entries.append(Entry("other", row, config, dense))
        line.records.append(record)
        line.dense.append(records.get(dense.key))
    return sorted(found.values(), key=lambda line: (line.domain, line.config.steps, line.name))


def table(lines: Sequence[Line]) -> str:
    """A Markdown table."""
    columns = (
        "row",
        "domain",
        "lr",
        "steps",
        "held-out loss by seed",
        "share of dense gain by seed",
        "mean",
        "payload MB",
        "of dense",
        "priors MB",
        "s, measured compute",
        "s, 40 µs per token",
    )
    rows = [columns, ("---", "---", *(["---:"] * (len(columns) - 2)))]
    for line in lines:
        config, record, dense = line.config, line.records[0], line.dense[0]
        shares = [share for share in line.shares if share is not None]
        payload = payload_bytes_of(record)
        boundaries, stages = len(config.cuts), len(config.cuts) + 1
        sent = bytes_per_stage(record, boundaries, config.steps)
        # Coding and correcting are left out: what they cost is measured elsewhere.
        compute = measured_stage_s(
            dense if dense is not None else record, stages, line.entries[0].reference.steps
        )
        calibrated = CALIBRATED_S_PER_TOKEN * config.tokens_per_step
        rows.append(
            (
                f"`{line.name}`",
                Path(config.domain).name,
                f"{config.learning_rate:g}",
                str(config.steps),
                " / ".join(f"{each['curve'][-1][1]:.3f}" for each in line.records),
                " / ".join("" if share is None else f"{share:.1%}" for share in line.shares),
                f"{statistics.mean(shares):.1%}" if shares else "",
                f"{payload / 1e6:.1f}",
                "" if dense is None else f"{payload / payload_bytes_of(dense):.1%}",
                f"{record['bytes']['priors'] / 1e6:.1f}",
                f"{config.steps * step_seconds(compute, sent):.0f}",
                f"{config.steps * step_seconds(calibrated, sent):.1f}",
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def figures(records: Mapping[str, Mapping[str, Any]], rates: Rates, plots: Sequence[str]) -> str:
    """All that is generated: a section for each group and number format that has finished rows."""
    parts: list[str] = []
    known: set[str] = set()
    for compute, its_rates in rates.items():
        for name, group in GROUPS.items():
            known |= {each.config.key for each in entries((name,), its_rates, compute=compute)}
            title = f"Group `{name}`, computed in {compute}: {group.says}"
            lines = lines_of(name, records, its_rates, compute)
            parts += _section(title, lines, f"{name}-{compute}", plots)
    parts += _section("Other rows", other_lines(records, rates, known), "other", plots)
    if not parts:
        parts.append("No row is finished yet.\n")
    parts.append(f"Journal: {len(records)} finished rows.")
    return "\n".join(parts)


def _section(title: str, lines: Sequence[Line], name: str, plots: Sequence[str]) -> list[str]:
    """Title, table, what the rows are, and plots; nothing if there is nothing to compare with dense."""
    if all(line.name == DENSE.name for line in lines):
        return []
    base = [f"{line.domain} {line.records[0]['curve'][0][1]:.3f}" for line in lines]
    return [
        f"### {title}\n",
        f"Loss before training: {', '.join(dict.fromkeys(base))}.\n",
        table(lines) + "\n",
        *(f"- `{line.name}`: {line.says}{_correction(line)}" for line in lines),
        "",
        *(f"![{plot}](img/{plot})\n" for plot in plots if plot.startswith(f"quality-{name}-")),
    ]


def _correction(line: Line) -> str:
    """What the corrector did on average, if there was one."""
    found = line.records[0]["corrector"]
    if found is None:
        return ""
    return (
        f" (active for {found['steps']} steps; cosine with the raw gradient {found['cosine']:.3f}, relative change "
        f"{found['relative_change']:.3f}, eta {found['eta']:.3f})"
    )


def write_report(journal: Journal, rates: Rates, output: Path, console: Console) -> None:
    """Write the figures into `output`/quality.md, between its marks, and the plots into `output`/img.

    Plots are left out, and that is said, where matplotlib is not installed. Raises ValueError for a page whose marks
    are missing.
    """
    records = journal.records()
    try:
        from benchmarks.quality.plots import draw
    except ImportError:
        console.print("no plots: pip install 'swarm-peer[bench]'", markup=False)
        plots: list[str] = []
    else:
        plots = []
        for compute, its_rates in rates.items():
            for name in GROUPS:
                lines = lines_of(name, records, its_rates, compute)
                plots += draw(f"{name}-{compute}", lines, output / "img")
    page = output / PAGE
    text = page.read_text(encoding="utf-8") if page.is_file() else f"# Quality\n\n{BEGIN}\n{END}\n"
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} needs one line {BEGIN!r} and one line {END!r}")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{head}{BEGIN}\n\n{figures(records, rates, plots)}\n\n{tail}", encoding="utf-8")
    console.print(f"{page}: {len(records)} rows, {len(plots)} plots", markup=False)
