"""What the paper says of sort."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from pondertime.claims.evidence import (
    Evidence,
    Finding,
    between,
    difficulty,
    error,
    measured,
    rows,
    shown,
    slope,
    steps,
)
from pondertime.claims.words import about, above, number, percent
from pondertime.results import Row, SequenceTrace
from pondertime.results.select import Group, Summary, summary

NEAR = 2  # steps from the last number that still are near the end of the input
MIDDLE = (2 + 15) / 2  # numbers: half of the sequences are longer


def best_group(e: Evidence) -> Group | None:
    return min(e.act, key=lambda group: error(group).mean, default=None)


def best_error(e: Evidence) -> Finding | None:
    """The error at the best tau is about 6 %."""
    best = best_group(e)
    if best is None:
        return None
    return Finding(about(error(best), 0.06), f"{percent(error(best))} at tau {best.tau:g}", best.rows)


def gain(e: Evidence) -> float | None:
    """The error without ACT over that of the best tau."""
    best = best_group(e)
    if best is None or not e.without:
        return None
    least = error(best).mean
    return error(e.without).mean / least if least else math.inf


def less_gain(e: Evidence) -> Finding | None:
    """ACT divides the error by less than in the other tasks of the paper that are made up."""
    ours, others = gain(e), {task: gain(its) for task, its in e.elsewhere.items() if task != "wikipedia"}
    there = {task: share for task, share in others.items() if share is not None}
    if ours is None or not there:
        return None
    beside = ", ".join(f"{task} {'over 1,000' if share > 1000 else f'{share:.1f}'}" for task, share in there.items())
    text = f"the error without ACT is {ours:.1f} times that of the best tau; {beside}"
    less = ours < min(there.values())
    # With some of the tasks missing they can only say that it is not so.
    holds = less if {"parity", "logic", "addition"} <= there.keys() or not less else None
    return Finding(holds, text, [*rows(e.act), *e.without])


def computation(e: Evidence) -> Finding | None:
    """The best networks make about 9 times the updates of those without ACT."""
    best = best_group(e)
    if best is None or not e.without:
        return None
    a, b = steps(best), steps(e.without)
    ratio = a.mean / b.mean
    s = Summary(ratio, ratio * math.hypot(a.error / a.mean, b.error / b.mean))
    return Finding(about(s, 9), f"{number(s, 1)} times at tau {best.tau:g}", [*best.rows, *e.without])


def by_length(
    e: Evidence, chosen: Sequence[Row], quantity: str, few: tuple[int, int], many: tuple[int, int]
) -> tuple[list[Row], list[float], list[float]] | None:
    """The networks that were measured, and their means over few and over many numbers."""
    used, long = measured(chosen, lambda row: between(e, row, quantity, *many))
    short = measured(used, lambda row: between(e, row, quantity, *few))[1]
    return (used, short, long) if used and len(short) == len(used) else None


def rises_with_length(e: Evidence) -> Finding | None:
    """The error grows rapidly with the length, in all networks: by 10 points or more from 2-5 to 12-15 numbers."""
    found = by_length(e, [*rows(e.act), *e.without], "error", (2, 5), (12, 15))
    if found is None:
        return None
    used, short, long = found
    grown = sum(b - a >= 0.1 for a, b in zip(short, long, strict=True))
    text = (
        f"{percent(summary(short))} (2-5 numbers), {percent(summary(long))} (12-15); "
        f"10 points or more in {grown} of {len(used)} networks"
    )
    return Finding(grown == len(used), text, used)


def better(e: Evidence) -> list[Group]:
    """The time penalties whose error is within two standard errors of the best one's."""
    best = best_group(e)
    if best is None:
        return []
    return [group for group in e.act if not above(error(group), error(best))]


def sublinear(e: Evidence) -> Finding | None:
    """In the better networks N grows with the length, less than linearly, and still does in the longer half."""
    used, powers = measured(rows(better(e)), lambda row: power(e, row))
    if not used:
        return None
    s, peak = summary(powers), summary(measured(used, lambda row: longest_at(e, row))[1])
    text = f"length to the power {number(s)}, N largest at {number(peak, 1)} numbers"
    later = summary(measured(used, lambda row: slope(e, row, low=MIDDLE))[1])
    grows = all(growth.mean > 2 * growth.error for growth in (s, later))
    return Finding(grows and s.mean + 2 * s.error < 1, text, used)


def longest_at(e: Evidence, row: Row) -> float | None:
    """The difficulty with the largest N."""
    line = difficulty(e, row, "steps")
    return None if line is None else float(line[0][line[1].argmax()])


def power(e: Evidence, row: Row) -> float | None:
    """The exponent of N against difficulty, from a straight line through the logarithms."""
    line = difficulty(e, row, "steps")
    return None if line is None else float(np.polyfit(np.log(line[0]), np.log(line[1]), 1)[0])


def spike(e: Evidence) -> Finding | None:
    """Ponder has its peak near the last number in most sequences, twice the median or more."""
    group = shown(e, e.traces)
    if group is None:
        return None
    used, near = measured(group.rows, lambda row: mean_of(is_near, e.traces.get(row.key, [])))
    height = summary(measured(used, lambda row: mean_of(prominence, e.traces.get(row.key, [])))[1])
    s = summary(near)
    text = (
        f"a peak at most {NEAR} steps from the last number in {percent(s)} of the figure's sequences, "
        f"{number(height, 1)} times the median (tau {group.tau:g})"
    )
    return Finding(s.mean > 0.5 and height.mean >= 2, text, used)


def spike_grows(e: Evidence) -> Finding | None:
    """The largest rho near the last number is larger in the longer sequences of the figure than in the shortest."""
    group = shown(e, e.traces)
    if group is None:
        return None
    used, more = measured(group.rows, lambda row: growth(e.traces.get(row.key, [])))
    if not used:
        return None
    s = summary(more)
    text = f"{larger(s, 1)} there in the figure's longer sequences than in its shortest (tau {group.tau:g})"
    return Finding(s.mean > 2 * s.error, text, used)


def average_falls(e: Evidence) -> Finding | None:
    """Yet the average over a sequence is lower in longer ones."""
    group = shown(e, e.points)
    found = None if group is None else by_length(e, group.rows, "rho", (5, 5), (15, 15))
    if group is None or found is None:
        return None
    used, short, long = found
    s = summary([b - a for a, b in zip(short, long, strict=True)])
    text = f"{larger(s, 2)} a step of 15 numbers than of 5 (tau {group.tau:g})"
    return Finding(s.mean < -2 * s.error, text, used)


def larger(s: Summary, digits: int) -> str:
    """How much more, or less."""
    return f"{number(Summary(abs(s.mean), s.error), digits)} {'less' if s.mean < 0 else 'more'} rho"


def mean_of(number_of: Callable[[SequenceTrace], float], sequences: list[SequenceTrace]) -> float | None:
    return float(np.mean([number_of(sequence) for sequence in sequences])) if sequences else None


def last_number(sequence: SequenceTrace) -> int:
    """The step of the last number: the first half of a sequence are the numbers."""
    return len(sequence.rho) // 2 - 1


def near_the_end(sequence: SequenceTrace) -> Sequence[float]:
    """rho at most NEAR steps from the last number."""
    last = last_number(sequence)
    return sequence.rho[max(last - NEAR, 0) : last + NEAR + 1]


def is_near(sequence: SequenceTrace) -> bool:
    """Whether ponder has its peak near the last number."""
    return abs(int(np.argmax(sequence.rho)) - last_number(sequence)) <= NEAR


def prominence(sequence: SequenceTrace) -> float:
    return max(sequence.rho) / float(np.median(sequence.rho))


def growth(sequences: list[SequenceTrace]) -> float | None:
    """What the longer sequences have more near the last number than the shortest."""
    peaks = [max(near_the_end(sequence)) for sequence in sorted(sequences, key=lambda sequence: len(sequence.rho))]
    return float(np.mean(peaks[1:])) - peaks[0] if len(peaks) > 1 else None
