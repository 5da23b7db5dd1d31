"""Every bound and deadline of a peer, in one place.

A remote peer is never trusted with a size or a wait: what it announces is compared with these figures
before memory is taken, and what it owes is due within these seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL_VERSION = 3
"""Raised whenever two versions of the program could not train together."""

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds, counts."""

    header_bytes: int = 1 * MIB
    """Largest frame header (an ARRIVE with a ledger of thousands of keys is the largest)."""
    short_header_bytes: int = 4 * KIB
    """Largest header of most kinds (a key, a few figures). Frames wait in queues that count payloads, and a parsed
    header takes up to 90 times its bytes."""
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
    greeting_streams_per_peer: int = 8
    """Streams on which a remote peer has not said HELLO yet."""
    in_flight: int = 64
    """Microbatches a stage peer holds between their forward and their backward."""
    early_frames: int = 128
    """Frames of a later step that wait for the commit of this one."""
    control_frames: int = 8192
    """Control frames that wait for a neighbour to read them."""
    stranger_frames: int = 4096
    """Frames that are quietly left aside of a peer whose record is not here (yet)."""
    offences: int = 5
    """Malformed frames after which a link is dropped."""
    offence_backoff_s: float = 60.0

    frame_s: float = 60.0
    frame_floor_bytes_per_s: float = 512.0
    """A frame that has begun is complete within `frame_s` and its bytes at this rate."""
    hello_s: float = 5.0
    """From opening a stream to the other side's HELLO."""
    dial_s: float = 5.0
    redial_first_s: float = 0.25
    redial_ceiling_s: float = 5.0
    meet_s: float = 8.0
    """From hearing of a neighbour to the first link with it, as long as it may be counted on."""
    reconnect_s: float = 3.0
    """A broken link whose peer has not come back in this time counts as lost."""
    heartbeat_s: float = 1.0
    redial_lost_s: float = 2.0
    redial_lost_ceiling_s: float = 60.0
    """First and longest pause before a peer that was lost is dialled again."""
    host_down_s: float = 30.0
    """While the own libp2p daemon is down, for at most this long, no neighbour counts as lost."""
    incarnation_kept_s: float = 60.0
    """A peer that was not heard of for this long may come back with a lower incarnation."""
    heartbeat_missing_s: float = 8.0
    """A neighbour that said nothing for this long counts as lost."""
    bulk_stall_s: float = 60.0
    """A neighbour that takes no bulk for this long, though some waits for it, does not work: its link is closed."""
    query_s: float = 2.0
    """Answers to QUERY (who holds a key, is a peer gone, which plan)."""
    round_s: float = 300.0
    """One attempt of an averaging round."""
    gate_s: float = 5.0
    """How long a round waits for its followers once it has everything else."""
    follow_behind: int = 64
    """Steps that a follower may lack when it is listed."""
    follow_fresh_s: float = 10.0
    """A FOLLOW that was not repeated in this time counts no more."""
    arrive_first_s: float = 30.0
    """How long a leader that is ready waits for the other members, before any round was measured..."""
    arrive_floor_s: float = 5.0
    arrive_ceiling_s: float = 60.0
    """...and the bounds of it from then on."""
    exchange_first_s: float = 60.0
    """One exchange, before any was measured..."""
    exchange_floor_s: float = 10.0
    exchange_ceiling_s: float = 120.0
    """...and the bounds of it from then on."""
    fetch_idle_s: float = 20.0
    """Between two chunks of a transfer."""
    start_s: float = 4.0
    """From proposing the first plan to the last acknowledgement."""
    left_out_s: float = 30.0
    """A peer that hears of a start without it proposes none of its own for so long."""
    start_refresh_s: float = 1.0
    """Between two looks at the noticeboard while the run has not started."""
    data_again_s: float = 5.0
    """A source that could not get the samples of its slot asks again after so long."""
    nudge_s: float = 20.0
    """Slots that have not ended for so long are assigned anew, which changes nothing for those under way."""
    follow_every_s: float = 2.0
    """Between two FOLLOW of a joiner."""
    follow_s: float = 120.0
    """A joiner that no COMMIT has listed by then looks again where the stage is."""
    follow_tries: int = 3
    """Rounds that may go on without a follower before it is told that it cannot keep up."""
    catch_up_rounds: int = 4
    """Looks after which a joiner that comes no closer is told that it cannot keep up."""
    refill_look_s: float = 1.0
    """Between two looks of a peer that waits for its stage."""
    cold_start_s: float = 60.0
    """How long the first source waits for somebody who holds the newest state of every stage."""
    updates_bytes: int = 16 * 1024 * MIB
    """Updates that a peer keeps on its disk for those who catch up; beyond it the oldest go."""
    updates_pending: int = 3
    """Updates that wait for the disk; the next one is then not kept."""
    update_wait_s: float = 10.0
    """How long an update that nobody has is asked for: its step may just be being written."""
    drain_s: float = 8.0
    """From the first signal to the exit."""
    busy_retry_s: float = 0.05
    """A neighbour without room rests so long, twice as long every time..."""
    busy_ceiling_s: float = 1.0
    """...up to this."""
    ask_again_s: float = 0.25
    """Between two questions who holds a key, while somebody who may hold it has not answered."""
    ready_s: float = 2.0
    """From a link that is up again to READY; a peer of the next stage that says nothing has stopped working."""
    forward_s: float = 60.0
    """A FORWARD that is neither accepted nor refused counts as on its way so long."""
    stall_warning_s: float = 30.0
    """A step that has not moved for this long is reported once."""


LIMITS = Limits()
