"""Which average a new leader has to finish: the question that keeps two halves from committing a step twice.

A leader commits an average once every member of the attempt has agreed to it, and an attempt has a quorum of
the roster. So of any later quorum somebody agreed to whatever was committed, and says so in its ARRIVE. Members
keep that word until they agree to something later; only the leader of the attempt that made the average
can take it back (FAILED), since only it could have committed. What may have been committed is agreed to again,
under a new attempt, by everybody who is there: those who lack the average just bear witness.
"""

from __future__ import annotations

from collections.abc import Mapping

from peers.round_messages import Held


def unfinished(reports: Mapping[str, Held | None]) -> Held | None:
    """The average that may have been committed somewhere, out of what the members say; None if there is none.

    An attempt that one of its members never agreed to cannot have been committed, once that member is in a
    later one. This does not help where an average is being finished: it may be committed by an earlier attempt.
    """
    records = {held.ballot: held for held in reports.values() if held is not None}
    for record in sorted(records.values(), key=lambda held: held.attempt, reverse=True):
        is_void = record.is_first and any(
            peer in reports and not _agreed(reports[peer], record) for peer in record.voters
        )
        if not is_void:
            return record
    return None


def is_available(record: Held, reports: Mapping[str, Held | None]) -> bool:
    """Whether one of these members has the average itself."""
    return any(h is not None and h.group == record.group and h.has_average for h in reports.values())


def _agreed(report: Held | None, record: Held) -> bool:
    return report is not None and report.ballot == record.ballot
