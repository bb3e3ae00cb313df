"""Draw the paper's figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pondertime.config import ConfigError, check_preset
from pondertime.flags import optional
from pondertime.show import say


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Draw the figures of the paper from stored results, as PNG and SVG."""

    only: Annotated[str | None, optional(metavar="NAME")] = None
    """Figures whose name starts with this, such as parity or enwik_bar."""
    results: Path = Path("results")
    """Folder of the result tables."""
    out: Path = Path("figures")
    """Where the figures go."""
    preset: Annotated[str | None, optional("(default: the preset with most networks)", "fast|paper")] = None
    """Whose results."""

    def run(self) -> None:
        if self.preset is not None:
            check_preset(self.preset)
        try:
            from pondertime import figures
        except ModuleNotFoundError as error:
            raise ConfigError(f"figures need {error.name}: pip install 'pondertime[plot]'") from None
        names = [n for n in figures.NAMES if n.startswith(self.only or "")]
        if not names:
            raise ConfigError(f"--only: no figure starts with {self.only!r}; they are {', '.join(figures.NAMES)}")
        missing = []
        for name in names:
            try:
                figures.save(name, self.results, self.out, preset=self.preset)
            except figures.MissingResults as error:
                missing.append(name)
                say(f"{name}: {error}")
            except ValueError as error:
                raise ConfigError(str(error)) from None
            else:
                say(f"{name}: {self.out / name}.png, .svg")
        if missing:
            raise ConfigError(f"{len(missing)} of {len(names)} figures have no results yet in {self.results}")
