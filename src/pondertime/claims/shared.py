"""Claims that are made of every task, or of several."""

import math
from collections.abc import Callable
from statistics import median

from pondertime.claims.evidence import (
    Evidence,
    Finding,
    against_tau,
    error,
    highest,
    lowest,
    measured,
    most_of_the_grid,
    reached,
    rows,
    slope,
    steps,
    successful,
    unsolved,
)
from pondertime.claims.settings import setting
from pondertime.claims.words import about, above, metric, number, percent, ranges, spread_out
from pondertime.config import PAPER
from pondertime.results import Row
from pondertime.results.select import Group, Summary, summary, value

# "Far below M" is less than this share of it; ponder "of 1" is less than ONE; a spread is large from this share of the
# mean on.
FAR = 0.25
ONE = 1.05
LARGE = 0.1
SOLVED = 0.05
# Two errors are the same within two standard errors, or so many (error rate; bits per character).
SLACK = {"wikipedia": 0.02}
SAME = 0.01


def far_below_limit(e: Evidence) -> Finding | None:
    """N of every network is far below M."""
    if not e.act:
        return None
    used = rows(e.act)
    most = max(used, key=lambda row: row.steps)
    limit = min(setting(row).max_steps for row in used)
    where, papers = f"tau {most.tau:g}, seed {most.seed}", PAPER[e.task].max_steps
    own = "" if limit == papers else f", ours; the paper's is {papers}"
    text = f"a mean N of {steps(used).mean:.2f}, at most {most.steps:.2f} ({where}); M is {limit}{own}"
    return Finding(most.steps < FAR * limit, text, used)


def depends_on_tau(e: Evidence) -> Finding | None:
    """The mean errors of the time penalties differ by a factor of two or more."""
    if len(e.act) < 2:
        return None
    low, high = min(e.act, key=lambda g: error(g).mean), max(e.act, key=lambda g: error(g).mean)
    best, worst = error(low), error(high)
    text = f"{metric(e.task, best)} (tau {low.tau:g}) to {metric(e.task, worst)} (tau {high.tau:g})"
    return Finding(worst.mean >= 2 * best.mean and above(worst, best), text, rows(e.act))


def more_ponder_at_low_tau(e: Evidence) -> Finding | None:
    """N is larger with a lower tau."""
    if len(e.act) > 2 and len({row.steps for row in rows(e.act)}) == 1:
        return Finding(False, "N is the same at every tau", rows(e.act))
    found = order(e, lambda row: row.steps, -1)
    if found is None:
        return None
    holds, text, used = found
    means = [f"{number(steps(group))} (tau {group.tau:g})" for group in e.act]
    return Finding(holds, f"a rank correlation of tau with N {text}; {', '.join(spread_out(means))}", used)


def plain_at_high_tau(e: Evidence) -> Finding | None:
    """At the highest tau N is 1, and the error is that of the network without ACT; the paper says so of logic alone."""
    if not e.act or not e.without:
        return None
    top = e.act[-1]
    ours, plain = error(top), error(e.without)
    same = abs(ours.mean - plain.mean) <= max(2 * math.hypot(ours.error, plain.error), SLACK.get(e.task, SAME))
    text = f"tau {top.tau:g}: N {number(steps(top))}, {metric(e.task, ours)}; without ACT {metric(e.task, plain)}"
    holds = steps(top).mean < ONE and same if e.task == "logic" else None
    return Finding(holds, text, [*top.rows, *e.without])


def error_without(expected: float, share: float) -> Callable[[Evidence], Finding | None]:
    """The mean error without ACT is about the paper's."""

    def check(e: Evidence) -> Finding | None:
        if not e.without:
            return None
        return Finding(about(error(e.without), expected, share), percent(error(e.without)), e.without)

    return check


def solved(limit: float, threshold: float) -> Callable[[Evidence], Finding | None]:
    """The mean error is below a threshold for every tau up to a limit."""

    def check(e: Evidence) -> Finding | None:
        meant = [group for group in e.act if (group.tau or 0) <= limit]
        if not meant:
            return None
        grid = [group.tau or 0 for group in e.act]
        good = [group for group in e.act if error(group).mean < threshold]
        best, top = min(meant, key=lambda g: error(g).mean), meant[-1]
        text = (
            f"below {100 * threshold:g} % for {ranges([g.tau or 0 for g in good], grid)} "
            f"({sum(g in good for g in meant)} of the {len(meant)} that are meant); best {percent(error(best))} "
            f"(tau {best.tau:g}), {percent(error(top))} at tau {top.tau:g}"
        )
        return Finding(all(g in good for g in meant), text, rows(meant))

    return check


def clear(correlations: list[float], sign: int) -> bool | None:
    """Whether the rank correlations of several seeds have this sign; None: one seed alone may have it by chance."""
    s = summary(correlations)
    return sign * s.mean > max(0.3, 2 * s.error) if len(correlations) > 1 else None


def correlation(found: list[float], used: list[Row]) -> str:
    """The mean rank correlation over seeds, and of how many where it is not all."""
    seeds = len({row.seed for row in used})
    some = "one seed" if len(found) == 1 else f"{len(found)} of {seeds} seeds" if len(found) < seeds else ""
    return number(summary(found)) + (f" ({some})" if some else "")


NO_ORDER = "unknown, as no seed has three quarters of the time penalties"


def order(
    e: Evidence, number_of: Callable[[Row], float | None], sign: int
) -> tuple[bool | None, str, list[Row]] | None:
    """Whether a number rises with tau (sign 1) or falls (-1): over the grid, and where the task is solved."""
    used, found = against_tau(e.act, number_of)
    if not found:
        few = used and len(e.act) > 2 and not any(most_of_the_grid(e.act, row.seed) for row in used)
        return (None, NO_ORDER, used) if few else None
    solving = successful(e)
    holds, text = clear(found, sign), correlation(found, used)
    some, there = against_tau(solving, number_of) if len(solving) < len(e.act) else ([], [])
    if there:
        holds, text = holds and clear(there, sign), f"{text} over the grid, {correlation(there, some)} where solved"
    return holds, text, used


def sooner(threshold: float, sign: int) -> Callable[[Evidence], Finding | None]:
    """The training error falls below a threshold sooner with a lower tau (sign 1) or with a higher one (-1)."""

    def check(e: Evidence) -> Finding | None:
        known, times = measured(rows(e.act), lambda row: reached(e, row, threshold))
        if len(e.act) > 2 and known and all(math.isinf(t) for t in times):
            return Finding(False, f"none of {len(known)} networks gets below {100 * threshold:g} % error", known)
        found = order(e, lambda row: reached(e, row, threshold), sign)
        if found is None:
            return None
        holds, text, used = found
        times = [f"{updates_to(e, g.rows, threshold)} (tau {g.tau:g})" for g in e.act]
        text = (
            f"a rank correlation of tau with the updates to less than {100 * threshold:g} % error {text}; "
            f"median {', '.join(spread_out(times))}"
        )
        return Finding(holds, text, used)

    return check


def updates_to(e: Evidence, chosen: list[Row], threshold: float) -> str:
    """The median of the updates that networks needed, "never" where half of them or more did not get there."""
    found = measured(chosen, lambda row: reached(e, row, threshold))[1]
    if not found:
        return "unknown"
    middle = median(found)
    return "never" if math.isinf(middle) else f"{middle:,.0f}"


def more_accurate_with_lower_tau(e: Evidence) -> Finding | None:
    """The final error is lower with a lower tau."""
    found = order(e, value, 1)
    if found is None:
        return None
    holds, text, used = found
    errors = [f"{percent(error(g))} (tau {g.tau:g})" for g in e.act]
    text = f"a rank correlation of tau with the error {text}; {', '.join(spread_out(errors))}"
    return Finding(holds, text, used)


def spread_of_ponder(e: Evidence) -> Finding | None:
    """N differs much from seed to seed at the lowest time penalties, and much more than at the highest.

    Asked of the networks that solve the task, where there are some: correct solutions of different length.
    """
    several = [group for group in e.act if len(group.rows) > 2]
    if len(several) < 2:
        return None

    def deviation(chosen: list[Group]) -> Summary:
        # Of a mean over so many seeds the error is sigma / sqrt(n).
        return summary(steps(group).error * math.sqrt(len(group.rows)) for group in chosen)

    low, high = lowest(several), highest(several)
    right = [Group(group.tau, [row for row in group.rows if value(row) < SOLVED]) for group in low]
    right = [group for group in right if len(group.rows) > 2]
    meant = right if 0 < len(rows(right)) < len(rows(low)) else low

    def said(chosen: list[Group], where: str) -> str:
        return f"{number(deviation(chosen))} ({where}mean N {number(steps(rows(chosen)))})"

    high_up = deviation(high)
    parts = [
        f"a standard deviation of N over seeds of {said(low, f'tau up to {low[-1].tau:g}, ')}",
        *([f"{said(right, '')} among those below {100 * SOLVED:g} % error"] if meant is right else []),
        f"{number(high_up)} (tau from {high[0].tau:g} on)",
    ]
    holds = deviation(meant).mean > max(2 * high_up.mean, LARGE * steps(rows(meant)).mean)
    return Finding(holds, ", ".join(parts), rows([*low, *high]))


def slope_against_tau(e: Evidence) -> Finding | None:
    """Of the networks that solve the task, ponder grows faster with difficulty the lower tau is."""
    used, found = against_tau(successful(e), lambda row: slope(e, row))
    if not found:
        few = measured(rows(successful(e)), lambda row: slope(e, row))[0]
        many = len(successful(e)) > 2
        why = "no seed has three quarters of them" if many else "less than three time penalties solve the task"
        return Finding(None, f"no order: {why}", few) if few else unsolved(e)
    slopes = [f"{number(summary(n), 3)} (tau {g.tau:g})" for g in successful(e) if (n := slopes_of(e, g))]
    text = f"a rank correlation of tau with the slope {correlation(found, used)}; slope {', '.join(spread_out(slopes))}"
    return Finding(clear(found, -1), text, used)


def slopes_of(e: Evidence, group: Group) -> list[float]:
    """The growth of N with difficulty of each network."""
    return measured(group.rows, lambda row: slope(e, row))[1]


def beside_workers(e: Evidence) -> Finding | None:
    """The error of networks trained by several asynchronous workers beside that of those trained by one."""
    known = {group.tau: group.rows for group in e.act} | ({None: e.without} if e.without else {})
    parts, used = [], []
    for tau in sorted({row.tau for row in e.asynchronous}, key=lambda tau: math.inf if tau is None else tau):
        theirs = [row for row in e.asynchronous if row.tau == tau]
        a, one = error(theirs), "with one not run yet"
        if tau in known:
            one = f"{percent(error(known[tau]))} with one (the grid)"
        name = "without ACT" if tau is None else f"tau {tau:g}"
        parts.append(f"{name}: {percent(a)} with {theirs[0].workers} workers (networks: {len(theirs)}), {one}")
        used += theirs
    return Finding(None, "; ".join(parts), used) if parts else None
