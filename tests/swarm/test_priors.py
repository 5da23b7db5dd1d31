"""Priors that anchors publish while a run trains: which are used, and what happens to those that must not be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dht.identity import Identity
from tests.kit.ledger import audit
from tests.kit.puppet_anchor import PuppetAnchor
from tests.kit.swarm import Swarm, wait_for

pytestmark = pytest.mark.e2e
STAGES, REPLICAS = 3, 2
NAMES = [f"{stage}-{replica}" for stage in range(STAGES) for replica in range(REPLICAS)]


def key(folder: Path, name: str) -> tuple[Path, str]:
    path = folder / f"{name}.key"
    identity = Identity.load_or_create(path)
    identity.close()
    return path, identity.peer_id


def begin(
    swarm: Swarm, anchors: tuple[str, ...], steps: int = 5000, snapshot_every: int = 10, **settings: Any
) -> Path:
    """A run under way, with the codec that priors are for."""
    run_dir = swarm.make_run(
        stages=STAGES,
        replicas=REPLICAS,
        steps=steps,
        codec="basis",
        mask_ratio=50.0,
        anchor_peers=anchors,
        snapshot_every=snapshot_every,
        learning_rate=1e-3,
    )
    swarm.seed()
    for name in NAMES:
        swarm.join(int(name[0]), name, **settings)
    wait_for(lambda: all(swarm.members[name].step >= 2 for name in NAMES), 60.0, "two steps", swarm)
    return run_dir


def priors(swarm: Swarm, name: str) -> dict[str, Any]:
    return (swarm.members[name].last("status") or {}).get("priors") or {"in_force": {}, "counters": {}}


def uses(swarm: Swarm, boundary: int, sha256: str) -> Callable[[], bool]:
    """Whether every peer of both stages works with this prior."""
    near = [name for name in NAMES if int(name[0]) in (boundary, boundary + 1)]
    return lambda: all(
        priors(swarm, name)["in_force"].get(str(boundary), {}).get("hash") == sha256[:16] for name in near
    )


def counted(swarm: Swarm, which: str, what: str, names: list[str], count: int = 1) -> Callable[[], bool]:
    return lambda: all(priors(swarm, name).get(which, {}).get(what) == count for name in names)


def still_trains(swarm: Swarm, steps: int = 5) -> None:
    """Every peer makes so many more steps."""
    goal = max(swarm.members[name].step for name in NAMES) + steps
    wait_for(lambda: all(swarm.members[name].step >= goal for name in NAMES), 60.0, "more steps", swarm)
    assert all(swarm.code(name) is None for name in NAMES), swarm.report()
    audited = audit({name: swarm.members[name].ledger() for name in NAMES}, stages=STAGES)
    assert not audited.doubled and not audited.lost, audited.problems()


def test_right_priors_are_used_and_wrong_ones_refused_counted_and_said_once(
    swarm: Swarm, tmp_path: Path
) -> None:
    first, first_id = key(tmp_path, "first")
    second, second_id = key(tmp_path, "second")
    stranger, stranger_id = key(tmp_path, "stranger")
    run_dir = begin(swarm, (first_id, second_id))
    sources = [name for name in NAMES if name[0] == "0"]
    near_0 = [name for name in NAMES if name[0] in "01"]
    near_1 = [name for name in NAMES if name[0] in "12"]
    with (
        PuppetAnchor(first, swarm.address, run_dir, tmp_path / "a") as a,
        PuppetAnchor(second, swarm.address, run_dir, tmp_path / "b") as b,
        PuppetAnchor(stranger, swarm.address, run_dir, tmp_path / "c") as c,
    ):
        good = a.offer(0, 1, a.initial(0, 1))
        wait_for(uses(swarm, 0, good), 60.0, "the first prior", swarm)
        still_trains(swarm)

        # Of somebody who is no anchor; with one flipped bit on the holder's disk; of another width.
        c.offer(0, 2, c.initial(0, 2))
        data = a.initial(0, 3)
        flipped = bytearray(data)
        flipped[-1] ^= 1
        a.offer(0, 3, data, served=bytes(flipped))
        a.offer(1, 3, a.initial(1, 3, mean=torch.zeros(3)))
        wait_for(counted(swarm, "offers", "stranger", NAMES), 30.0, "the stranger to be counted", swarm)
        assert all(
            len([note for note in swarm.members[name].notes if f"{stranger_id[-8:]} offers" in note]) == 1
            for name in NAMES
        ), "said once"
        wait_for(
            counted(swarm, "counters", "refused_hash", near_0), 60.0, "the flipped bit to be found", swarm
        )
        wait_for(counted(swarm, "counters", "refused_file", near_1), 60.0, "the wrong shape", swarm)

        # An anchor names, and serves, what a stranger has made.
        a.offer(0, 4, c.initial(0, 4))
        wait_for(
            counted(swarm, "counters", "refused_publisher", near_0), 60.0, "whose it is to be seen", swarm
        )
        assert all(
            len([note for note in swarm.members[name].notes if "is no anchor" in note and "made it" in note])
            == 1
            for name in near_0
        ), "said once"

        # No prior at all, and one with values that nothing can be coded with.
        a.offer(0, 5, a.initial(0, 5, scale=torch.full_like(a.arrays(0)["scale"], -1.0)))
        a.offer(1, 5, b"no safetensors file at all")
        wait_for(counted(swarm, "counters", "refused_arrays", near_0), 60.0, "the useless arrays", swarm)
        wait_for(counted(swarm, "counters", "refused_file", near_1, 2), 60.0, "the wrong file", swarm)
        assert uses(swarm, 0, good)(), "the good one is still in force"

        # Two anchors, one step: the first in the manifest's order counts.
        theirs = b.offer(0, 7, b.initial(0, 7, mean=torch.ones(64)))
        wait_for(uses(swarm, 0, theirs), 60.0, "the second anchor's prior, alone", swarm)
        ours = a.offer(0, 8, a.initial(0, 8))
        wait_for(uses(swarm, 0, ours), 60.0, "the first anchor's prior", swarm)
        b.offer(0, 8, b.initial(0, 8, mean=torch.ones(64)))
        wait_for(counted(swarm, "offers", "conflict", sources), 30.0, "the conflict to be counted", swarm)
        assert uses(swarm, 0, ours)()
        still_trains(swarm)
    # Without any anchor the swarm goes on with what it has.
    still_trains(swarm)
    assert uses(swarm, 0, ours)()


def test_peer_that_lacks_the_prior_in_force_gets_it_from_any_holder_and_works(
    swarm: Swarm, tmp_path: Path
) -> None:
    anchor, anchor_id = key(tmp_path, "anchor")
    run_dir = begin(swarm, (anchor_id,), steps=2000)
    with PuppetAnchor(anchor, swarm.address, run_dir, tmp_path / "a") as a:
        prior = a.offer(1, 1, a.initial(1, 1))
        wait_for(uses(swarm, 1, prior), 60.0, "the prior", swarm)
    # The anchor is gone; a newcomer knows the prior by the plan alone.
    swarm.kill("2-1")
    newcomer = swarm.join(2, "newcomer")
    wait_for(
        lambda: (newcomer.last("status") or {}).get("microbatches_done", 0) > 0,
        90.0,
        "the newcomer's work",
        swarm,
    )
    assert priors(swarm, "newcomer")["counters"] == {"fetched": 1}
    audited = audit({name: swarm.members[name].ledger() for name in [*NAMES, "newcomer"]}, stages=STAGES)
    assert not audited.doubled and not audited.lost, audited.problems()


def test_source_that_cannot_get_the_prior_in_force_keeps_nobody_waiting(swarm: Swarm, tmp_path: Path) -> None:
    anchor, anchor_id = key(tmp_path, "anchor")
    run_dir = begin(swarm, (anchor_id,))
    with PuppetAnchor(anchor, swarm.address, run_dir, tmp_path / "a") as a:
        (own,) = (
            path for path in (swarm.folder / "0-1").rglob("checkpoints/*") if (path / "updates").is_dir()
        )
        shutil.rmtree(own / "priors", ignore_errors=True)
        (own / "priors").touch()  # in the place of the folder
        prior = a.offer(0, 1, a.initial(0, 1))

        def in_force() -> bool:
            return all(
                priors(swarm, name)["in_force"].get("0", {}).get("hash") == prior[:16] for name in NAMES[:4]
            )

        # Half of its stage is enough after a while; the other source does the work from then on.
        wait_for(in_force, 60.0, "the prior that one source lacks", swarm)
        still_trains(swarm, 10)
    assert priors(swarm, "0-1")["waited_s"] > 0 and not priors(swarm, "0-1")["counters"].get("fetched")
    assert any("cannot be used" in note and "priors" in note for note in swarm.members["0-1"].notes)


@pytest.mark.slow
def test_anchor_that_is_killed_while_its_prior_is_fetched_stops_nobody(swarm: Swarm, tmp_path: Path) -> None:
    first, first_id = key(tmp_path, "first")
    second, second_id = key(tmp_path, "second")
    run_dir = begin(swarm, (first_id, second_id))
    near = [name for name in NAMES if name[0] in "01"]
    with (
        # Slow enough to be caught in the middle: nobody has the whole file then.
        PuppetAnchor(first, swarm.address, run_dir, tmp_path / "a", upload_mbps=0.1) as a,
        PuppetAnchor(second, swarm.address, run_dir, tmp_path / "b") as b,
    ):
        data = a.initial(0, 1)
        lost = a.offer(0, 1, data)
        wait_for(lambda: a.bytes_served > len(data) // 4, 60.0, "the transfers to be under way", swarm)
        a.kill()
        assert a.bytes_served < len(data), "somebody may have it whole"
        still_trains(swarm)
        wait_for(counted(swarm, "counters", "refused_hash", near), 90.0, "the broken transfers", swarm)
        assert not uses(swarm, 0, lost)()
        assert all(
            len([note for note in swarm.members[name].notes if f"prior {lost[:12]}" in note]) == 1
            for name in near
        ), "said once"
        good = b.offer(0, 2, b.initial(0, 2))
        wait_for(uses(swarm, 0, good), 90.0, "the other anchor's prior", swarm)
        still_trains(swarm)
