"""What the paper says of parity."""

from collections.abc import Callable

from pondertime.claims.evidence import (
    Evidence,
    Finding,
    between,
    difficulty,
    error,
    hardly_pondering,
    lowest,
    measured,
    rows,
    slope,
    straight,
    successful,
    unsolved,
)
from pondertime.claims.words import above, number, percent
from pondertime.results import Row
from pondertime.results.select import summary

HALF = 32


def grows_with_difficulty(e: Evidence) -> Finding | None:
    """Ponder grows with the number of bits, about linearly, in the networks that solve the task."""
    used, slopes = measured(rows(successful(e)), lambda row: slope(e, row))
    linear = straight(e, used)
    if linear is None:
        return unsolved(e)
    s = summary(slopes)
    rising = sum(v > 0 for v in slopes)
    text = f"{number(s, 4)} steps a bit, rising in {rising} of {len(used)} networks; {linear.ours}"
    return Finding(s.mean > 2 * s.error and linear.holds, text, used)


def jumps_after_half(e: Evidence) -> Finding | None:
    """In some networks of the lowest time penalties ponder rises steeply after 32 bits.

    Steeply: three times as fast as before, and by one step or more on average.
    """
    low = lowest(e.act)
    used, jumps = measured(rows(low), lambda row: jump(e, row))
    if not used:
        return None
    steep = [row for row in used if is_steep(e, row)]
    text = (
        f"{len(steep)} of {len(used)} networks (tau up to {low[-1].tau:g}); beyond 32 bits N is "
        f"{number(summary(jumps))} higher on average"
    )
    return Finding(bool(steep), text, used)


def jump(e: Evidence, row: Row) -> float | None:
    """How much larger N is above 32 bits than up to there."""
    line = difficulty(e, row, "steps")
    if line is None or not line[0].min() <= HALF < line[0].max():
        return None
    return float(line[1][line[0] > HALF].mean() - line[1][line[0] <= HALF].mean())


def is_steep(e: Evidence, row: Row) -> bool:
    before, after = slope(e, row, high=HALF), slope(e, row, low=HALF)
    rise = jump(e, row)
    return None not in (before, after, rise) and after > 3 * max(before, 0) and rise >= 1  # type: ignore[operator]


def over(e: Evidence, quantity: str, low: int, high: int) -> Callable[[Row], float | None]:
    return lambda row: between(e, row, quantity, low, high)


def hard_without(e: Evidence) -> Finding | None:
    """Without ACT and at the highest time penalties the error rises sharply, and ponder does not change."""
    parts, used, holds = [], [], True
    for name, chosen in hardly_pondering(e):
        own = measured(chosen, over(e, "error", 49, 64))[0]
        if not own:
            continue
        few, many = (summary(measured(own, over(e, "error", *bits))[1]) for bits in ((1, 16), (49, 64)))
        short, long = (measured(own, over(e, "steps", *bits))[1] for bits in ((1, 16), (49, 64)))
        change = summary(b - a for a, b in zip(short, long, strict=True))
        holds &= many.mean - few.mean > 0.2 and abs(change.mean) < 0.5
        parts.append(
            f"{name}: error {percent(few)} (1-16 bits), {percent(many)} (49-64), N changes by {number(change)}"
        )
        used += own
    return Finding(holds, "; ".join(parts), used) if parts else None


def best_still_rises(e: Evidence) -> Finding | None:
    """Even at the best tau the error rises somewhat with the number of bits."""
    if not e.act:
        return None
    best = min(e.act, key=lambda g: error(g).mean)
    used, many = measured(best.rows, over(e, "error", 49, 64))
    if not used:
        return None
    a, b = summary(measured(used, over(e, "error", 1, 16))[1]), summary(many)
    return Finding(above(b, a), f"{percent(a)} (1-16 bits), {percent(b)} (49-64 bits) at tau {best.tau:g}", used)
