"""The table and the plot of finished rows, for docs/averaging.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.averaging.rows import ROWS, AveragingRow, Row, dense_of

BEGIN = "<!-- figures: python -m benchmarks.averaging report -->"
END = "<!-- end of figures -->"
IMAGE = "img/averaging-bytes.png"


def found_rows(records: Mapping[str, dict[str, Any]]) -> list[tuple[Row, list[dict[str, Any]]]]:
    """Declared rows with their finished records, seed by seed."""
    found = []
    for row in ROWS:
        its = [record for record in records.values() if record["row"] == row.name and "mode" not in record]
        if its:
            found.append((row, sorted(its, key=lambda record: record["config"].get("seed", 0))))
    return found


def final_loss(record: dict[str, Any]) -> float:
    """Held-out loss after the last step."""
    return float(record["curve"][-1][1])


def table(records: Mapping[str, dict[str, Any]]) -> list[str]:
    """Markdown lines: bytes per step and member, ratios, loss, and the gap to dense averages at equal steps."""
    rows = found_rows(records)
    by_name = {row.name: its for row, its in rows}
    lines = [
        "| row | what it is | MB per step and member | against bf16 | against fp32 | loss | gap to dense |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, its in rows:
        config = AveragingRow.model_validate(its[0]["config"])
        per_step = its[0]["sent"][-1][1] / config.steps
        loss = sum(map(final_loss, its)) / len(its)
        dense = by_name.get(dense_of(row).name)
        gap = "" if dense is None else f"{loss - sum(map(final_loss, dense)) / len(dense):+.4f}"
        exact = its[0]["elements"] * 2 * (config.replicas - 1) / config.replicas
        lines.append(
            f"| {row.name} | {row.says} | {per_step / 1e6:.2f} | {2 * exact / per_step:.1f}x | "
            f"{4 * exact / per_step:.1f}x | {loss:.4f} | {gap} |"
        )
    return lines


def swarm_table(records: Mapping[str, dict[str, Any]]) -> list[str]:
    """Markdown lines: rows through a real swarm beside the simulated ones; none without a swarm's row of `fp32`."""
    real = {record["row"]: record for record in records.values() if record.get("mode") == "swarm"}
    simulated = {row.name: its[0] for row, its in found_rows(records)}
    if "fp32" not in real:
        return []
    lines = [
        "| row | loss of the swarm | gap to its `fp32` | simulated gap | MB per step and member, counted | computed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, record in real.items():
        steps = record["config"]["steps"]
        gap = f"{record['loss'] - real['fp32']['loss']:+.4f}"
        beside = simulated.get(name)
        ideal = computed = ""
        if beside is not None and "fp32" in simulated:
            ideal = f"{final_loss(beside) - final_loss(simulated['fp32']):+.4f}"
            computed = f"{beside['sent'][-1][1] / steps / 1e6:.2f}"
        lines.append(
            f"| {name} | {record['loss']:.4f} | {gap} | {ideal} | {record['sent'] / steps / 1e6:.2f} | {computed} |"
        )
    return lines


def draw(records: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Held-out loss at the end against bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, plot = pyplot.subplots(figsize=(7, 4.6))
    for row, its in found_rows(records):
        loss = sum(map(final_loss, its)) / len(its)
        sent = its[0]["sent"][-1][1] / 1e6
        plot.plot([sent], [loss], "o")
        plot.annotate(row.name, (sent, loss), fontsize=7, textcoords="offset points", xytext=(4, 3))
    plot.set_xscale("log")
    plot.set_xlabel("MB that a member sends in the whole run")
    plot.set_ylabel("held-out loss after it (nats per token)")
    plot.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_report(records: Mapping[str, dict[str, Any]], folder: Path) -> int:
    """Put table and plot into `folder / averaging.md`; returns the number of rows. Raises ValueError without marks."""
    page = folder / "averaging.md"
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no {BEGIN} ... {END}")
    lines = table(records) if records else ["No row is finished yet."]
    if len(found_rows(records)) > 1:
        draw(records, folder / IMAGE)
        lines += ["", f"![held-out loss against bytes]({IMAGE})"]
    if real := swarm_table(records):
        lines += [
            "",
            "The same through a real swarm (two stages on loopback, held-out rows of its own):",
            "",
            *real,
        ]
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{tail}", encoding="utf-8")
    return len(found_rows(records))
