"""The states of a peer, and which may follow which. Pure."""

from __future__ import annotations

from typing import Literal

State = Literal["joining", "syncing", "online", "draining", "offline"]

_NEXT: dict[State, tuple[State, ...]] = {
    "joining": ("syncing", "draining", "offline"),
    "syncing": ("online", "draining", "offline"),
    "online": ("syncing", "draining", "offline"),
    "draining": ("offline",),
    "offline": (),
}


class Lifecycle:
    """One peer's state: joining (finding the run), syncing (fetching and loading), online (working, or serving
    after the last step), draining (handing back and saying goodbye), offline."""

    def __init__(self) -> None:
        self.state: State = "joining"

    def go(self, state: State) -> None:
        """Enter a state. Raises ValueError for a transition that does not exist; repeating a state is none."""
        if state == self.state:
            return
        if state not in _NEXT[self.state]:
            raise ValueError(f"a peer that is {self.state} cannot become {state}")
        self.state = state
