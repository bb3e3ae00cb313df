"""Numbers as they stand in the table: with their standard error, where there is one."""

from collections.abc import Sequence

from pondertime.results.select import Summary

# "About", "around" and "roughly" mean within this share of the paper's number.
ABOUT = 0.2


def figures_of(task: str) -> str:
    """What the names of a task's figures start with; those of wikipedia with the name of its data."""
    return "enwik" if task == "wikipedia" else task


def number(s: Summary, digits: int = 2) -> str:
    """``2.31 ± 0.04``; the error is left out where there is none, as of a single network."""
    return _with_error(s, digits)


def percent(s: Summary, digits: int = 1) -> str:
    """``38.9 % ± 0.4 %``; of a number that would be shown as zero and is not, more digits."""
    if 0 < 100 * s.mean < 0.5 * 10**-digits:
        digits += 2
    return _with_error(Summary(100 * s.mean, 100 * s.error), digits, " %")


def _with_error(s: Summary, digits: int, unit: str = "") -> str:
    """The error with one digit more where it would be shown as zero; left out if it still would."""
    for shown in (digits, digits + 1):
        if round(s.error, shown):
            return f"{s.mean:.{shown}f}{unit} ± {s.error:.{shown}f}{unit}"
    return f"{s.mean:.{digits}f}{unit}"


def metric(task: str, s: Summary) -> str:
    """An error rate, or bits per character."""
    return f"{number(s, 3)} bits" if task == "wikipedia" else percent(s)


def about(s: Summary, expected: float, share: float = ABOUT) -> bool:
    """Whether a mean is the paper's number, give or take a share of it or two standard errors."""
    return abs(s.mean - expected) <= max(share * expected, 2 * s.error)


def above(a: Summary, b: Summary) -> bool:
    """Whether a is larger than b by two standard errors of the difference."""
    return a.mean - b.mean > 2 * (a.error**2 + b.error**2) ** 0.5


def ranges(chosen: Sequence[float], grid: Sequence[float]) -> str:
    """Some of a grid's time penalties: neighbours as a range."""
    parts: list[list[float]] = []
    places = {tau: i for i, tau in enumerate(grid)}
    for tau in chosen:
        if parts and places[tau] == places[parts[-1][-1]] + 1:
            parts[-1].append(tau)
        else:
            parts.append([tau])
    texts = [f"{part[0]:g}" if len(part) == 1 else f"{part[0]:g} to {part[-1]:g}" for part in parts]
    return f"tau {', '.join(texts)}" if texts else "no tau"


def spread_out(items: Sequence[str], most: int = 5) -> list[str]:
    """At most so many of a list, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
