"""What the paper says of logic."""

import math
from statistics import median

from pondertime.claims.evidence import (
    Evidence,
    Finding,
    between,
    error,
    hardly_pondering,
    lowest,
    measured,
    reached,
    rows,
    slope,
    steps,
    successful,
    unsolved,
)
from pondertime.claims.words import about, above, number, percent
from pondertime.results.select import Summary, summary

LOW = 0.01
SOLVED = 0.05
PAPER_UPDATES = 16 * 10_000


def without_act(e: Evidence) -> Finding | None:
    """The error without ACT is about 20 %, by the sequence or by the target."""
    if not e.without:
        return None
    sequence, target = error(e.without), summary(row.target_error or 0 for row in e.without)
    text = f"{percent(sequence)} of sequences, {percent(target)} of targets"
    return Finding(about(sequence, 0.2) or about(target, 0.2), text, e.without)


def targets_solved(e: Evidence) -> Finding | None:
    """The error per target is virtually zero (below 1 %) for every low tau."""
    low = [group for group in e.act if (group.tau or 0) <= LOW]
    if not low:
        return None
    means = {group.tau: summary(row.target_error or 0 for row in group.rows) for group in low}
    worst = max(means, key=lambda tau: means[tau].mean)
    good = sum(s.mean < 0.01 for s in means.values())
    text = f"below 1 % for {good} of {len(low)} taus; worst {percent(means[worst])} at tau {worst:g}"
    return Finding(good == len(low), text, rows(low))


def solved_after(e: Evidence) -> Finding | None:
    """Low time penalties solve the task in about 10,000 iterations of 16 workers."""
    low = [group for group in e.act if (group.tau or 0) <= LOW]
    used, found = measured(rows(low), lambda row: reached(e, row, SOLVED))
    if not used:
        return None
    there = [updates for updates in found if math.isfinite(updates)]
    if not there:
        return Finding(False, f"none of {len(used)} networks gets below {100 * SOLVED:g} % error", used)
    s = summary(there)
    text = (
        f"below {100 * SOLVED:g} % error after {s.mean:,.0f} ± {s.error:,.0f} updates ({len(there)} of {len(used)} "
        f"networks), which is {s.mean / 16:,.0f} iterations of 16 workers"
    )
    return Finding(about(Summary(median(found), 0), PAPER_UPDATES), text, used)


def ponder_at_lowest(e: Evidence) -> Finding | None:
    """The networks with the lowest time penalties make 5 to 6 steps an input: their mean, and half of them or more."""
    if not e.act:
        return None
    low = lowest(e.act)
    used = rows(low)
    s = steps(used)
    there = sum(5 <= row.steps <= 6 for row in used)
    text = f"{number(s)} (tau up to {low[-1].tau:g}); {there} of {len(used)} networks between 5 and 6"
    return Finding(5 - 2 * s.error <= s.mean <= 6 + 2 * s.error and 2 * there >= len(used), text, used)


def single_gate(e: Evidence) -> Finding | None:
    """Some networks make more than 10 steps for a single gate."""
    used, found = measured(rows(e.act), lambda row: between(e, row, "steps", 1, 1))
    if not used:
        return None
    most = used[max(range(len(used)), key=lambda i: found[i])]
    text = (
        f"{sum(n > 10 for n in found)} of {len(used)} networks; mean {number(summary(found))}, "
        f"most {max(found):.2f} (tau {most.tau:g}, seed {most.seed})"
    )
    return Finding(max(found) > 10, text, used)


def much_for_one_gate(e: Evidence) -> Finding | None:
    """The networks that solve the task ponder more for one gate than for five."""
    used, one = measured(rows(successful(e)), lambda row: between(e, row, "steps", 1, 1))
    five = measured(used, lambda row: between(e, row, "steps", 5, 5))[1]
    if not used or len(five) < len(one):
        return unsolved(e)
    a, b = summary(one), summary(five)
    more = sum(n > m for n, m in zip(one, five, strict=True))
    text = f"N {number(a)} at one gate, {number(b)} at five; more at one in {more} of {len(used)} networks"
    return Finding(above(a, b), text, used)


def grows_from_five(e: Evidence) -> Finding | None:
    """From 5 to 10 gates ponder grows in the networks that solve the task."""
    used, found = measured(rows(successful(e)), lambda row: slope(e, row, 5, 10))
    if not used:
        return unsolved(e)
    s, before = summary(found), summary(measured(used, lambda row: slope(e, row, 1, 5))[1])
    text = f"{number(s, 3)} steps a gate from 5 to 10 gates, {number(before, 3)} from 1 to 5"
    return Finding(s.mean > 2 * s.error, text, used)


def abrupt_after_five(e: Evidence) -> Finding | None:
    """Where networks hardly ponder the error rises abruptly after 5 gates: from 5 to 7 twice as fast as before."""
    parts, used, holds = [], [], True
    for name, chosen in hardly_pondering(e):
        own, before = measured(chosen, lambda row: slope(e, row, 1, 5, "error"))
        after = measured(own, lambda row: slope(e, row, 5, 7, "error"))[1]
        if not after:
            continue
        a, b = summary(before), summary(after)
        at = ", ".join(
            f"{percent(summary(found))} ({gates})"
            for gates in (3, 4, 5, 6, 7)
            if (found := measured(own, lambda row, gates=gates: between(e, row, "error", gates, gates))[1])
        )
        holds &= b.mean > 2 * max(a.mean, 0) and b.mean > 2 * b.error
        parts.append(
            f"{name}: a rise of {percent(a)} a gate up to 5 gates, of {percent(b)} from 5 to 7; at gates: {at}"
        )
        used += own
    return Finding(holds, "; ".join(parts), used) if parts else None
