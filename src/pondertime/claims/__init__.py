"""The claims of the paper's experiments, each with our number beside it, from stored results only.

python -m pondertime.claims --results results --out docs/results.md
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pondertime.claims import addition, logic, parity, shared, sort, wikipedia
from pondertime.claims.evidence import Evidence, Finding, load_all
from pondertime.claims.words import figures_of

__all__ = ["CLAIMS", "Claim", "Evidence", "Finding", "check"]

NOT_RUN = "not run yet"


class Claim(NamedTuple):
    """A claim of the paper about one task, where it is drawn, and what checks it."""

    task: str
    text: str
    paper: str
    figure: str
    check: Callable[[Evidence], Finding | None]


def of_every_task(task: str, limit: int) -> list[Claim]:
    """The claims that the paper makes in general; of wikipedia it says itself that the error depends little on tau."""
    name = figures_of(task)
    sensitive = Claim(task, "error against tau", "quite sensitive to its value", f"{name}_bar", shared.depends_on_tau)
    return [
        Claim(task, "N stays far below M", f"far less than M = {limit}", f"{name}_plot", shared.far_below_limit),
        *([sensitive] if task != "wikipedia" else []),
        Claim(task, "ponder against tau", "more at lower tau", f"{name}_plot", shared.more_ponder_at_low_tau),
        Claim(
            task,
            "at high tau N goes to 1, and ACT equals the plain network",
            "said of logic",
            f"{name}_plot",
            shared.plain_at_high_tau,
        ),
    ]


def _task(task: str, limit: int, *lines: tuple[str, str, str, Callable[[Evidence], Finding | None]]) -> list[Claim]:
    name = figures_of(task)
    own = [Claim(task, text, paper, f"{name}_{kind}", checked) for text, paper, kind, checked in lines]
    return [*own, *of_every_task(task, limit)]


CLAIMS: list[Claim] = [
    *_task(
        "parity",
        100,
        ("mean error without ACT", "almost 40 %", "bar", shared.error_without(0.4, 0.1)),
        ("mean error for tau up to 0.03", "below 5 %", "bar", shared.solved(0.03, 0.05)),
        ("faster with lower tau", "yes", "plot", shared.sooner(0.1, 1)),
        ("more accurate with lower tau", "yes", "plot", shared.more_accurate_with_lower_tau),
        ("spread of ponder at low tau", "very high", "plot", shared.spread_of_ponder),
        ("ponder against difficulty, where solved", "about linear", "difficulty", parity.grows_with_difficulty),
        ("its slope", "generally grows as tau falls", "difficulty", shared.slope_against_tau),
        ("ponder after 32 bits, lowest tau", "jumps in some networks", "difficulty", parity.jumps_after_half),
        ("without ACT and at high tau", "error rises sharply, N constant", "difficulty", parity.hard_without),
        ("error against difficulty, best tau", "rises somewhat", "difficulty", parity.best_still_rises),
        ("16 asynchronous workers", "how the paper trains", "bar", shared.beside_workers),
    ),
    *_task(
        "logic",
        100,
        ("error without ACT", "a minimum of about 20 %", "bar", logic.without_act),
        ("error per sequence for tau up to 0.01", "virtually zero", "bar", shared.solved(logic.LOW, 0.01)),
        ("error per target for tau up to 0.01", "virtually zero", "bar", logic.targets_solved),
        ("solved at low tau after", "about 10,000 iterations of 16 workers", "plot", logic.solved_after),
        ("ponder at the lowest tau", "5 to 6", "plot", logic.ponder_at_lowest),
        ("spread of ponder at low tau", "quite large", "plot", shared.spread_of_ponder),
        ("steps for a single gate", "more than 10 in some networks", "difficulty", logic.single_gate),
        ("ponder for the least difficult inputs", "surprisingly high", "difficulty", logic.much_for_one_gate),
        ("ponder from 5 to 10 gates", "gradually increases", "difficulty", logic.grows_from_five),
        ("error without ACT and at high tau", "abrupt after 5 gates", "difficulty", logic.abrupt_after_five),
        ("16 asynchronous workers", "how the paper trains", "bar", shared.beside_workers),
    ),
    *_task(
        "addition",
        20,
        ("error for every tau", "perfectly solved", "bar", shared.solved(float("inf"), 0.01)),
        ("error without ACT", "in a figure only", "bar", addition.without_act),
        ("sooner with higher tau", "yes", "plot", shared.sooner(0.1, -1)),
        ("ponder against the digits", "about linear for most", "difficulty", addition.linear_in_digits),
        ("its slope at the highest tau", "close to 1", "difficulty", addition.slope_at_highest),
        ("digits summed at a step", "a rough lower bound of rho", "sequence", addition.at_least_the_digits),
    ),
    *_task(
        "sort",
        100,
        ("error without ACT", "around 12 %", "bar", shared.error_without(0.12, 0.2)),
        ("error at the best tau", "around 6 %", "bar", sort.best_error),
        ("what ACT gains", "less than in the three tasks before", "bar", sort.less_gain),
        ("its computation over that without ACT", "roughly 9 times", "plot", sort.computation),
        ("error against length", "grows rapidly for all networks", "difficulty", sort.rises_with_length),
        ("ponder against length, better networks", "sublinear growth", "difficulty", sort.sublinear),
        ("ponder along a sequence", "a large spike near the end of the input", "sequence", sort.spike),
        ("that spike", "much higher in longer sequences", "sequence", sort.spike_grows),
        ("average ponder of a sequence", "lower in longer sequences", "difficulty", sort.average_falls),
    ),
    *_task(
        "wikipedia",
        100,
        ("bits per character with ACT", "fairly similar to without, for every tau", "bar", wikipedia.similar_bits),
        ("data efficiency", "somewhat better with ACT", "plot", wikipedia.data_efficiency),
        ("data efficiency against tau", "greater at lower tau", "plot", wikipedia.efficient_at_low_tau),
        ("ponder per character", "much lower than in the other tasks", "plot", wikipedia.little_ponder),
        ("at spaces", "pauses", "sequence", wikipedia.pauses_at_spaces),
        ("at commas and full stops", "longer than at spaces", "sequence", wikipedia.longer_at_marks),
        ("loss and entropy there", "not likely to increase", "sequence", wikipedia.easy_at_marks),
        ("at the opening brackets of XML tags", "an effective detector", "sequence_2", wikipedia.marks_tags),
        ("at ID numbers", "no more time, high loss and entropy", "sequence_2", wikipedia.not_at_numbers),
        (
            "word boundaries told by rho",
            "better than by loss or entropy",
            "sequence",
            wikipedia.tells_boundaries("word"),
        ),
        ("sentence boundaries told by rho", "better too", "sequence", wikipedia.tells_boundaries("sentence")),
    ),
]


def check(results_dir: Path | str, preset: str | None = None) -> list[tuple[Claim, Finding | None]]:
    """Every claim with what our results say; None where there are none yet."""
    evidence = load_all(results_dir, preset)
    return [(claim, claim.check(evidence[claim.task])) for claim in CLAIMS]


def answer(finding: Finding | None) -> str:
    """Our number, and whether it is what the paper says."""
    if finding is None:
        return NOT_RUN
    return f"not reached: ours is {finding.ours}" if finding.holds is False else finding.ours
