"""Progress that a person can watch: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between two plain lines
console = Console(stderr=True)


def plain_lines() -> None:
    """No live line from now on: several processes share the terminal."""
    global console
    console = Console(stderr=True, force_terminal=False)


class Reporter:
    """Shows how far a training is, and the newest metrics."""

    def __init__(self, title: str, total: int, *, done: int = 0) -> None:
        self.title, self.total = title, total
        self.live: Progress | None = None
        self.last = time.monotonic() - EVERY + 1
        if console.is_terminal:
            # On a narrow terminal the note is worth more than the bar, and is what is cut off.
            bar = [BarColumn(bar_width=20)] if console.width >= 100 else []
            self.live = Progress(
                TextColumn("[bold]{task.description}"),
                *bar,
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
            )
            self.task = self.live.add_task(title, total=total, completed=done, note="")

    def __enter__(self) -> "Reporter":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def update(self, done: int, note: str = "") -> None:
        """Show progress; plain lines come every few seconds only."""
        if self.live is not None:
            self.live.update(self.task, completed=done, note=note)
        elif time.monotonic() - self.last >= EVERY:
            self.last = time.monotonic()
            print(f"{self.title}  {done}/{self.total}  {note}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the live one."""
        console.print(text, highlight=False, markup=False, soft_wrap=True)
