"""What garbage collection may cost a peer.

A full collection walks every object of the program: with torch, transformers and hivemind loaded that is some
200,000, and the communication loop stands still for 100 ms and more. Heartbeats are late then, and a capped
line runs empty.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Leave what lives now out of later collections: modules and what was built of them stay until the end.

    Called once what is long-lived is loaded, and before a process is forked, whose copies then share the memory.
    """
    gc.collect()
    gc.freeze()
