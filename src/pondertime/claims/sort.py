"""What the paper says of sort."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from pondertime.claims.evidence import Evidence, Finding, between, difficulty, error, measured, rows, shown, steps
from pondertime.claims.words import about, number, percent
from pondertime.results import Row, SequenceTrace
from pondertime.results.select import Group, Summary, summary

NEAR = 2  # steps from the last number that still are near the end of the input


def best_group(e: Evidence) -> Group | None:
    return min(e.act, key=lambda group: error(group).mean, default=None)


def best_error(e: Evidence) -> Finding | None:
    """The error at the best tau is about 6 %."""
    best = best_group(e)
    if best is None:
        return None
    return Finding(about(error(best), 0.06), f"{percent(error(best))} at tau {best.tau:g}", best.rows)


def over_plain(
    of: Callable[..., Summary], paper: float, digits: int, words: str
) -> Callable[[Evidence], Finding | None]:
    """A number of the best networks over that of those without ACT is about the paper's."""

    def check(e: Evidence) -> Finding | None:
        best = best_group(e)
        if best is None or not e.without:
            return None
        a, b = of(best), of(e.without)
        ratio = a.mean / b.mean
        s = Summary(ratio, ratio * math.hypot(a.error / a.mean, b.error / b.mean))
        return Finding(about(s, paper), f"{number(s, digits)} {words} at tau {best.tau:g}", [*best.rows, *e.without])

    return check


gain = over_plain(error, 0.5, 2, "of it")
computation = over_plain(steps, 9, 1, "times")


def rises_with_length(e: Evidence) -> Finding | None:
    """The error grows rapidly with the length, in all networks: by 10 points or more from 2-5 to 12-15 numbers."""
    used, long = measured([*rows(e.act), *e.without], lambda row: between(e, row, "error", 12, 15))
    short = measured(used, lambda row: between(e, row, "error", 2, 5))[1]
    if not used or len(short) != len(used):
        return None
    grown = sum(b - a >= 0.1 for a, b in zip(short, long, strict=True))
    text = (
        f"{percent(summary(short))} (2-5 numbers), {percent(summary(long))} (12-15); "
        f"10 points or more in {grown} of {len(used)} networks"
    )
    return Finding(grown == len(used), text, used)


def sublinear(e: Evidence) -> Finding | None:
    """In the networks that are better than those without ACT, N grows with the length, less than linearly."""
    limit = error(e.without).mean if e.without else 1.0
    better = [group for group in e.act if error(group).mean < limit]
    used, powers = measured(rows(better), lambda row: power(e, row))
    if not used:
        return None
    s = summary(powers)
    text = f"length to the power {number(s)}"
    return Finding(s.mean > 2 * s.error and s.mean + 2 * s.error < 1, text, used)


def power(e: Evidence, row: Row) -> float | None:
    """The exponent of N against difficulty, from a straight line through the logarithms."""
    line = difficulty(e, row, "steps")
    return None if line is None else float(np.polyfit(np.log(line[0]), np.log(line[1]), 1)[0])


def spike(e: Evidence) -> Finding | None:
    """Ponder has its spike near the last number: at most NEAR steps from it, twice the median or more."""
    group = shown(e, e.traces)
    if group is None:
        return None
    used, away = measured(group.rows, lambda row: mean_of(distance, e.traces.get(row.key, [])))
    height = summary(measured(used, lambda row: mean_of(prominence, e.traces.get(row.key, [])))[1])
    s = summary(away)
    text = f"{number(s, 1)} steps from the last number, {number(height, 1)} times the median (tau {group.tau:g})"
    return Finding(s.mean <= NEAR and height.mean >= 2, text, used)


def compared(e: Evidence, number_of: Callable[[SequenceTrace], float], sign: int, name: str) -> Finding | None:
    """Whether a number is larger (sign 1) or smaller (-1) in the longest sequence than in the shortest."""
    group = shown(e, e.traces)
    if group is None:
        return None
    used, more = measured(group.rows, lambda row: growth(e.traces.get(row.key, []), number_of))
    if not used:
        return None
    s = summary(more)
    text = f"{number(s, 1)} more rho {name} of the longest sequence than of the shortest (tau {group.tau:g})"
    return Finding(sign * s.mean > 2 * s.error, text, used)


def spike_grows(e: Evidence) -> Finding | None:
    """The spike near the last number is higher in longer sequences."""
    return compared(e, lambda sequence: max(near_the_end(sequence)), 1, "at the peak near the last number")


def average_falls(e: Evidence) -> Finding | None:
    """Yet the average over a sequence is lower."""
    return compared(e, lambda sequence: float(np.mean(sequence.rho)), -1, "a step")


def mean_of(number_of, sequences: list[SequenceTrace]) -> float | None:
    return float(np.mean([number_of(sequence) for sequence in sequences])) if sequences else None


def last_number(sequence: SequenceTrace) -> int:
    """The step of the last number: the first half of a sequence are the numbers."""
    return len(sequence.rho) // 2 - 1


def near_the_end(sequence: SequenceTrace) -> Sequence[float]:
    """rho at most NEAR steps from the last number."""
    last = last_number(sequence)
    return sequence.rho[max(last - NEAR, 0) : last + NEAR + 1]


def distance(sequence: SequenceTrace) -> float:
    """Steps from the last number to the peak of ponder."""
    return abs(int(np.argmax(sequence.rho)) - last_number(sequence))


def prominence(sequence: SequenceTrace) -> float:
    return max(sequence.rho) / float(np.median(sequence.rho))


def growth(sequences: list[SequenceTrace], number_of: Callable[[SequenceTrace], float]) -> float | None:
    ordered = sorted(sequences, key=lambda sequence: len(sequence.rho))
    if not ordered or len(ordered[0].rho) == len(ordered[-1].rho):
        return None
    return number_of(ordered[-1]) - number_of(ordered[0])
