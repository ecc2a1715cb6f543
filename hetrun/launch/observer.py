"""What launch tells while it runs; who listens is left to the command line."""

from __future__ import annotations

from typing import Protocol

from hetrun.model import Event


class Observer(Protocol):
    """Called from the thread that called `launch`. Text from hosts is free of control characters."""

    def on_status(self, host: str, text: str) -> None:
        """A host got further: "connected", "torchrun started", "stopping", ..."""
        ...

    def on_event(self, event: Event) -> None:
        """A rank wrote an event."""
        ...

    def on_line(self, host: str, rank: int | None, line: str) -> None:
        """A rank, or torchrun itself (rank None), printed a line."""
        ...
