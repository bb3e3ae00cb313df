"""Get the Wikipedia data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pondertime.flags import Positional
from pondertime.show import say


@dataclass(frozen=True, kw_only=True)
class Data:
    """Fetch, check and unpack the Wikipedia data."""

    name: Positional[Literal["enwik8"]] = "enwik8"
    """Which data."""
    source: Annotated[Path | None, tyro.conf.arg(name="from", metavar="FILE", help_behavior_hint="")] = None
    """A local copy: plain, .gz, .xz or .zip. Without it the data is downloaded."""

    def run(self) -> None:
        from pondertime import data

        say(f"{data.prepare(self.source)}: 100,000,000 bytes, checked")
