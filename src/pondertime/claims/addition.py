"""What the paper says of addition."""

from pondertime.claims.evidence import Evidence, Finding, error, measured, rows, shown, straight
from pondertime.claims.shared import slopes_of
from pondertime.claims.words import about, number, percent, spread_out
from pondertime.results import SequenceTrace
from pondertime.results.select import digits, summary


def without_act(e: Evidence) -> Finding | None:
    """The error without ACT, of which the paper's text says nothing."""
    return Finding(None, percent(error(e.without)), e.without) if e.without else None


def linear_in_digits(e: Evidence) -> Finding | None:
    """Ponder is about linear in the number of digits for most networks."""
    return straight(e, rows(e.act))


def slope_at_highest(e: Evidence) -> Finding | None:
    """At the highest tau ponder grows by about one step a digit."""
    known = [(group, found) for group in e.act if (found := slopes_of(e, group))]
    if not known:
        return None
    top, slopes = known[-1]
    others = [f"{number(summary(found))} (tau {group.tau:g})" for group, found in known[:-1]]
    text = f"{number(summary(slopes))} steps a digit at tau {top.tau:g}; {', '.join(spread_out(others, 6))}"
    return Finding(about(summary(slopes), 1), text.removesuffix("; "), top.rows)


def at_least_the_digits(e: Evidence) -> Finding | None:
    """Ponder at a step is at least about the number of digits of the two numbers that are summed."""
    group = shown(e, e.traces)
    if group is None:
        return None
    used, shares = measured(group.rows, lambda row: share_above(e.traces.get(row.key, [])))
    s = summary(shares)
    some = len(e.traces[used[0].key])
    text = f"in {percent(s)} of the steps from the second on, in {some} sequences a network (tau {group.tau:g})"
    return Finding(s.mean >= 0.8, text, used)


def share_above(sequences: list[SequenceTrace]) -> float | None:
    """The share of steps, from the second on, with rho of at least the digits that are summed."""
    enough = [
        rho >= count
        for sequence in sequences
        for rho, count in list(zip(sequence.rho, digits(sequence.input), strict=True))[1:]
    ]
    return sum(enough) / len(enough) if enough else None
