"""What the paper says of Wikipedia."""

from collections.abc import Callable

import numpy as np

from pondertime.claims.evidence import Evidence, Finding, error, measured, rows, shown, steps
from pondertime.claims.shared import order
from pondertime.claims.words import above, number
from pondertime.results import Boundary, CharacterClass, Row
from pondertime.results.select import Summary, summary

SIMILAR = 0.05  # "fairly similar": within this share
START = 0.2  # learning curves are compared after this share of the training
PAUSE = 0.1  # of rho: less is no pause, however sure


def similar_bits(e: Evidence) -> Finding | None:
    """Bits per character are about the same with and without ACT, and for every tau, after equal updates."""
    if not e.act or not e.without:
        return None
    used = [*rows(e.act), *e.without]
    if len({row.updates for row in used}) > 1:
        return Finding(None, "not comparable yet: the networks have not made equal updates", used)
    plain = error(e.without)
    shown = [f"{number(error(group), 3)} (tau {group.tau:g})" for group in e.act]
    text = f"{', '.join(shown)}; without ACT {number(plain, 3)}"
    return Finding(all(abs(error(g).mean / plain.mean - 1) <= SIMILAR for g in e.act), text, used)


def gains(e: Evidence) -> tuple[dict[Row, float], int] | None:
    """How many bits per character networks are below those without ACT at equal updates, averaged over the training
    after its first fifth, and up to which update."""
    plain = [e.curves[row.key] for row in e.without if row.key in e.curves]
    acts = [row for row in rows(e.act) if row.key in e.curves]
    if not plain or not acts:
        return None
    end = min(curve.updates[-1] for curve in [*plain, *(e.curves[row.key] for row in acts)])
    at = np.linspace(START * end, end, 200)
    without = np.mean([np.interp(at, curve.updates, curve.bpc) for curve in plain], axis=0)

    def gain(row: Row) -> float:
        curve = e.curves[row.key]
        return float((without - np.interp(at, curve.updates, curve.bpc)).mean())

    return {row: gain(row) for row in acts}, int(end)


def data_efficiency(e: Evidence) -> Finding | None:
    """At equal updates the bits per character are lower with ACT."""
    made = gains(e)
    if made is None:
        return None
    found, end = made
    known = [(group.tau, [found[row] for row in group.rows if row in found]) for group in e.act]
    s = summary(found.values())
    # One seed at several time penalties is no spread of chance.
    over = number(s, 3) if len({row.seed for row in found}) > 1 else f"{s.mean:.3f}"
    parts = ", ".join(f"{number(summary(some), 3)} (tau {tau:g})" for tau, some in known if some)
    text = f"{over} bits below those without ACT up to {end:,} updates: {parts}"
    return Finding(s.mean > 2 * s.error, text, [*found, *e.without])


def efficient_at_low_tau(e: Evidence) -> Finding | None:
    """Networks with a lower tau are more data-efficient."""
    found = gains(e)
    made = order(e, found[0].get, -1) if found is not None else None
    if made is None:
        return None
    holds, text, used = made
    return Finding(holds, f"a rank correlation of tau with the bits gained {text}", used)


def little_ponder(e: Evidence) -> Finding | None:
    """Networks ponder less than in the other tasks at the same tau."""
    others = {task: {group.tau: steps(group) for group in its.act} for task, its in e.elsewhere.items()}
    parts, used, holds = [], [], True
    for group in e.act:
        beside = {task: known[group.tau] for task, known in others.items() if group.tau in known}
        if beside:
            named = ", ".join(f"{task} {number(n)}" for task, n in beside.items())
            parts.append(f"N {number(steps(group))} at tau {group.tau:g} ({named})")
            used += group.rows
            holds &= all(above(n, steps(group)) for n in beside.values())
    return Finding(holds, ", ".join(parts), used) if parts else None


def over_networks(found: list[tuple[float, float]]) -> Summary:
    """The mean over networks; of a single one its own standard error, over sequences."""
    return Summary(*found[0]) if len(found) == 1 else summary(value for value, _ in found)


def at_characters(e: Evidence) -> Callable[[str, str], Summary] | None:
    """The mean of a measure at a kind of character, or None where the tables have not all that is asked for."""
    group = shown(e, e.classes)
    if group is None:
        return None
    tables = [{item.kind: item for item in e.classes[row.key]} for row in group.rows if row.key in e.classes]
    if not all(
        {"letter", "space", "comma", "full stop", "tag", "bracket", "ID digit"} <= table.keys() for table in tables
    ):
        return None

    def look_up(kind: str, measure: str) -> Summary:
        def pair(item: CharacterClass) -> tuple[float, float]:
            return getattr(item, measure), getattr(item, f"{measure}_se")

        return over_networks([pair(table[kind]) for table in tables])

    return look_up


def used_for(e: Evidence, table: dict) -> list[Row]:
    group = shown(e, table)
    return [] if group is None else measured(group.rows, lambda row: 0.0 if row.key in table else None)[0]


def pauses(at: Callable[[str, str], Summary], kind: str, beside: str) -> bool:
    """Whether rho is larger at one kind of character than at another, surely and by a pause."""
    a, b = at(kind, "rho"), at(beside, "rho")
    return above(a, b) and a.mean - b.mean > PAUSE


def said(at: Callable[[str, str], Summary], measure: str, *kinds: str) -> str:
    return ", ".join(f"{number(at(kind, measure))} ({kind})" for kind in kinds)


def longer_at(*kinds: str, than: str, also: tuple[str, ...] = ()) -> Callable[[Evidence], Finding | None]:
    """rho is larger at these kinds of character than at another; ``also``: said beside them."""

    def check(e: Evidence) -> Finding | None:
        at = at_characters(e)
        if at is None:
            return None
        holds = all(pauses(at, kind, than) for kind in kinds)
        return Finding(holds, f"rho {said(at, 'rho', than, *kinds, *also)}", used_for(e, e.classes))

    return check


pauses_at_spaces = longer_at("space", than="letter")
longer_at_marks = longer_at("comma", "full stop", than="space")
# The opening brackets of XML tags.
marks_tags = longer_at("tag", than="letter", also=("bracket",))


def not_at_numbers(e: Evidence) -> Finding | None:
    """At the digits of IDs rho is no larger than at letters, but loss and entropy are."""
    at = at_characters(e)
    if at is None:
        return None
    number_of, letter = "ID digit", "letter"
    harder = all(above(at(number_of, m), at(letter, m)) for m in ("loss", "entropy"))
    parts = (f"{m} {said(at, m, letter, number_of)}" for m in ("rho", "loss", "entropy"))
    holds = harder and not pauses(at, number_of, letter)
    return Finding(holds, "; ".join(parts), used_for(e, e.classes))


def easy_at_marks(e: Evidence) -> Finding | None:
    """At commas and full stops, which a space follows, loss and entropy are no larger than at letters."""
    at = at_characters(e)
    if at is None:
        return None
    marks = ("comma", "full stop")
    harder = any(above(at(kind, m), at("letter", m)) for kind in marks for m in ("loss", "entropy"))
    parts = (f"{m} {said(at, m, 'letter', *marks)}" for m in ("loss", "entropy"))
    return Finding(not harder, "; ".join(parts), used_for(e, e.classes))


def tells_boundaries(kind: str) -> Callable[[Evidence], Finding | None]:
    """rho tells where words, or sentences, end better than loss and entropy do, and N better than nothing.

    The latter, as rho may tell by differences that cost no time.
    """

    def check(e: Evidence) -> Finding | None:
        used = used_for(e, e.boundaries)
        tables = [{b.measure: b for b in e.boundaries[row.key] if b.kind == kind} for row in used]
        if not tables or not all({"rho", "loss", "entropy", "steps", "always"} <= table.keys() for table in tables):
            return None

        def pair(item: Boundary) -> tuple[float, float]:
            return item.f1, item.f1_se

        f1 = {m: over_networks([pair(table[m]) for table in tables]) for m in tables[0]}
        names = {"steps": "N", "always": "a boundary everywhere"}
        text = "F1 " + ", ".join(f"{number(s, 3)} ({names.get(m, m)})" for m, s in f1.items())
        better = above(f1["rho"], f1["loss"]) and above(f1["rho"], f1["entropy"])
        return Finding(better and above(f1["steps"], f1["always"]), text, used)

    return check
