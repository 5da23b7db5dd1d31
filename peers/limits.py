"""Every bound and deadline of a peer, in one place.

A remote peer is never trusted with a size or a wait: what it announces is compared with these figures
before memory is taken, and what it owes is due within these seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL_VERSION = 1
"""Raised whenever two versions of the program could not train together."""

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds, counts."""

    header_bytes: int = 1 * MIB
    """Largest frame header (an ARRIVE with a ledger of thousands of keys is the largest)."""
    payload_bytes: int = 512 * MIB
    """Largest frame payload before the manifest is known; afterwards the run's own largest frame."""
    control_payload_bytes: int = 1 * MIB
    """Largest payload on a control stream."""
    write_chunk_bytes: int = 256 * KIB
    """Written between two waits for the transport to drain."""
    read_chunk_bytes: int = 256 * KIB
    averaging_chunk_elements: int = 128 * KIB
    """Elements of one PART or AVERAGE frame (512 KiB of fp32)."""
    transfer_chunk_bytes: int = 1 * MIB
    """Bytes of one CHUNK of an artifact or a snapshot."""
    artifact_bytes: int = 256 * 1024 * MIB
    """Largest artifact a manifest may name."""
    bulk_streams: int = 2
    """Parallel bulk streams of a link: one yamux stream reaches 75-80% of a WAN line, two 95%."""
    links: int = 512
    """Links a peer holds at most."""
    links_per_peer_bundles: int = 2
    """Half-open stream bundles one remote peer may hold."""
    in_flight: int = 64
    """Microbatches a stage peer holds between their forward and their backward."""
    early_frames: int = 128
    """Frames of a later step that wait for the commit of this one."""
    control_frames: int = 8192
    """Control frames that wait for a neighbour to read them."""
    offences: int = 5
    """Malformed frames after which a link is dropped."""
    offence_backoff_s: float = 60.0

    hello_s: float = 5.0
    """From opening a stream to the other side's HELLO."""
    dial_s: float = 5.0
    redial_first_s: float = 0.25
    redial_ceiling_s: float = 5.0
    reconnect_s: float = 3.0
    """A broken link whose peer has not come back in this time counts as lost."""
    heartbeat_s: float = 1.0
    heartbeat_missing_s: float = 15.0
    """A neighbour that said nothing for this long counts as lost."""
    query_s: float = 2.0
    """Answers to QUERY (who holds a key, is a peer gone, which plan)."""
    round_s: float = 300.0
    """One attempt of an averaging round."""
    fetch_idle_s: float = 20.0
    """Between two chunks of a transfer."""
    start_s: float = 4.0
    """From proposing the first plan to the last acknowledgement."""
    start_refresh_s: float = 1.0
    """Between two looks at the noticeboard while the run has not started."""
    drain_s: float = 8.0
    """From the first signal to the exit."""
    busy_retry_s: float = 0.05
    stall_warning_s: float = 30.0
    """A step that has not moved for this long is reported once."""


LIMITS = Limits()
