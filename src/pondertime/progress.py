"""Progress that a person can watch: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(stderr=True)


class Reporter:
    """Shows how far a training is, and the newest metrics."""

    def __init__(self, title: str, total: int, *, every: float = 10.0) -> None:
        self.title, self.total, self.every = title, total, every
        self.live: Progress | None = None
        self.last = time.monotonic() - every + 1
        if console.is_terminal:
            self.live = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=console,
                transient=False,
            )
            self.task = self.live.add_task(title, total=total, note="")

    def __enter__(self) -> "Reporter":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def update(self, done: int, note: str = "", *, force: bool = False) -> None:
        """Show progress; plain lines come every few seconds only."""
        if self.live is not None:
            self.live.update(self.task, completed=done, note=note)
        elif force or time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            print(f"{self.title}  {done}/{self.total}  {note}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the live one."""
        console.print(text, highlight=False, markup=False)
