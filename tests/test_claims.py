"""Claims on made-up results whose answers are computed by hand."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from claim_tables import Table, curve, found, of, points
from fake_results import make_results, make_row
from pondertime.claims import CLAIMS, answer, check, parity, shared
from pondertime.claims.__main__ import main
from pondertime.claims.evidence import against_tau, load, lowest, rank_correlation, reached
from pondertime.claims.settings import describe, setting
from pondertime.claims.words import number, percent, ranges, spread_out
from pondertime.config import FAST, TASK_NAMES
from pondertime.figures import NAMES
from pondertime.results.commands import read_flags, settings
from pondertime.results.select import Summary


@pytest.fixture
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    return Table(tmp_path, request.param)


def test_every_claim_has_a_figure_and_an_answer(tmp_path: Path) -> None:
    """Without results all are open; with results of every kind none fails."""
    assert {claim.task for claim in CLAIMS} == set(TASK_NAMES)
    assert {claim.figure for claim in CLAIMS} <= set(NAMES)
    assert {answer(finding) for _, finding in check(tmp_path / "nothing")} == {"not run yet"}
    for task in TASK_NAMES:
        make_results(tmp_path, task)
    answers = {(claim.task, claim.text): answer(finding) for claim, finding in check(tmp_path)}
    assert len(answers) == len(CLAIMS)
    open_ones = {text for (_, text), said in answers.items() if said == "not run yet"}
    assert open_ones == {
        "16 asynchronous workers", "at spaces", "at commas and full stops", "at the opening brackets of XML tags",
        "loss and entropy there", "at ID numbers", "word boundaries told by rho", "sentence boundaries told by rho",
    }  # fmt: skip


@of("parity")
def test_error_without_act(table: Table) -> None:
    table.errors({None: [0.36, 0.40, 0.38]})
    error = statistics.stdev([0.36, 0.40, 0.38]) / math.sqrt(3)
    found(shared.error_without(0.4, 0.1)(table.load()), True, f"38.0 % ± {100 * error:.1f} %")
    found(shared.error_without(0.2, 0.2)(table.load()), False)
    assert shared.solved(0.03, 0.05)(table.load()) is None


@of("parity")
def test_solved_for_which_tau(table: Table) -> None:
    table.errors({0.001: [0.02, 0.04], 0.002: [0.2, 0.0], 0.01: [0.01, 0.01], 0.03: [0.04, 0.05], 0.1: [0.3, 0.4]})
    finding = shared.solved(0.03, 0.05)(table.load())
    found(
        finding, False, "below 5 % for tau 0.001, 0.01 to 0.03 (3 of the 4", "best 1.0 % (tau 0.01)", "4.5 % ± 0.5 % at"
    )
    assert finding is not None and len(finding.rows) == 8
    found(shared.solved(0.001, 0.05)(table.load()), True, "(1 of the 1 that")
    found(shared.solved(math.inf, 0.001)(table.load()), False, "below 0.1 % for no tau (0 of the 5")


@of("parity")
def test_sooner_and_more_accurate(table: Table) -> None:
    for seed in (0, 1):
        for tau, updates, error in ((0.001, 300, 0.01), (0.01, 200, 0.02), (0.1, 400, 0.03), (1.0, None, 0.4)):
            steps = [(100, 0.5), (updates or 800, 0.09 if updates else 0.3), (900, error)]
            table.add(tau, seed, error=error, curve=curve(*steps))
    e = table.load()
    assert [reached(e, g.rows[0], 0.1) for g in e.act] == [300, 200, 400, math.inf]
    # Ranks of tau 0 1 2 3, of the updates 1 0 2 3: 1 - 6 * 2 / (4 * 15).
    # Where it is solved 1 0 2: 1 - 6 * 2 / (3 * 8).
    said = "less than 10 % error 0.80 over the grid, 0.50 where solved;"
    found(shared.sooner(0.1, 1)(e), True, said, "median 300 (tau 0.001)", "never (tau 1)")
    found(shared.sooner(0.1, -1)(e), False)
    assert shared.updates_to(e, e.act[0].rows[:1] + e.act[1].rows[:1], 0.1) == "250"
    assert shared.updates_to(e, e.act[0].rows[:1] + e.act[3].rows[:1], 0.1) == "never", "half of them do"
    found(shared.sooner(0.001, 1)(e), False, "none of 8 networks gets below 0.1 % error")
    found(shared.more_accurate_with_lower_tau(e), True, "with the error 1.00 over the grid, 1.00 where solved;")
    for seed in (0, 1):
        table.add(0.001, seed, error=0.04)
    # Over the grid 2 0 1 3, where solved 2 0 1.
    said = "with the error 0.40 over the grid, -0.50 where solved;"
    found(shared.more_accurate_with_lower_tau(table.load()), False, said)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 10, 20, math.inf]) == pytest.approx(4.5 / math.sqrt(5 * 4.5))
    assert rank_correlation([1, 2, 3], [5, 5, 5]) is None


@of("parity")
def test_a_seed_with_a_part_of_the_grid_says_nothing_of_its_order(table: Table) -> None:
    """Over the high time penalties alone the order may be the other way round; its networks still count in means."""
    grid = [0.001, 0.003, 0.01, 0.03, 0.1]
    for seed, taus, sign in ((1, grid, 1), (2, grid[2:], -1), (3, grid[:1] + grid[2:], 1)):
        for i, tau in enumerate(taus):
            table.add(tau, seed, error=0.4 + sign * 0.05 * i)
    e = table.load()
    used, correlations = against_tau(e.act, lambda row: row.error)
    assert correlations == [pytest.approx(1), pytest.approx(1)], "of seeds 1 and 3, which lacks one of five"
    assert used == [row for group in e.act for row in group.rows] and len(used) == 12
    assert against_tau(e.act[2:], lambda row: row.error)[1] == [pytest.approx(n) for n in (1, -1, 1)]
    assert against_tau([], lambda row: row.error) == ([], [])
    finding = shared.more_accurate_with_lower_tau(e)
    spread = statistics.stdev([0.6, 0.3, 0.55]) / math.sqrt(3)
    found(finding, True, "with the error 1.00 (2 of 3 seeds);", f"48.3 % ± {100 * spread:.1f} % (tau 0.1)")
    assert finding is not None and len(finding.rows) == 12


@of("parity")
def test_seeds_that_all_have_a_part_of_the_grid_tell_no_order(table: Table) -> None:
    grid = [0.001, 0.003, 0.01, 0.03, 0.1]
    for seed in range(3):
        for tau in grid[seed : seed + 3]:
            table.add(tau, seed, error=0.01, steps=2.0 + tau, points=points({1: 1.0, 64: 2.0 + tau}))
    e, unknown = table.load(), "unknown, as no seed has three quarters of the time penalties; "
    found(shared.more_accurate_with_lower_tau(e), None, f"of tau with the error {unknown}1.0 % (tau 0.001)")
    found(shared.more_ponder_at_low_tau(e), None, f"of tau with N {unknown}2.00 (tau 0.001)")
    found(shared.slope_against_tau(e), None, "no order: no seed has three quarters of them")
    found(parity.grows_with_difficulty(e), True, "above 0.95 in 9 of 9 networks, and for 5 of 5 taus in the mean")
    for seed in range(3):
        for tau in grid[seed : seed + 3]:
            table.add(tau, seed, error=0.5, steps=1.0, curve=curve((100, 0.5), (200, 0.5)))
    e = table.load()
    found(shared.sooner(0.1, 1)(e), False, "none of 9 networks gets below 10 % error")
    found(shared.more_ponder_at_low_tau(e), False, "N is the same at every tau")


@of("parity")
def test_ponder_against_bits(table: Table) -> None:
    table.add(None, 0, error=0.4)
    for seed in (0, 1):
        for tau, rate in ((0.001, 0.3), (0.003, 0.2), (0.01, 0.1)):
            line = {k: 1 + (rate + 0.02 * seed) * k for k in range(1, 65)}
            table.add(tau, seed, error=0.03, points=points(line))
        table.add(0.1, seed, error=0.38, points=points(dict.fromkeys(range(1, 65), 1.0)))
    e = table.load()
    found(parity.grows_with_difficulty(e), True, "0.2100 ±", "rising in 6 of 6 networks", "above 0.95 in 6 of 6")
    found(
        shared.slope_against_tau(e),
        True,
        "with the slope -1.00",
        "0.310 ± 0.010 (tau 0.001)",
        "0.110 ± 0.010 (tau 0.01)",
    )
    found(parity.jumps_after_half(e), False, "0 of 2 networks (tau up to 0.001)")


@of("parity")
def test_no_network_that_solves_it(table: Table) -> None:
    table.add(None, 0, error=0.4)
    table.add(0.1, 0, error=0.38, points=points({1: 1.0, 64: 1.0}))
    for check_it in (parity.grows_with_difficulty, shared.slope_against_tau):
        found(check_it(table.load()), False, "no tau has half the error")


@of("parity")
def test_a_jump_after_32_bits(table: Table) -> None:
    flat = dict.fromkeys(range(1, 65), 2.0)
    jumping = {k: 2.0 + (0.5 * (k - 32) if k > 32 else 0) for k in range(1, 65)}
    for seed, line in enumerate((flat, jumping, flat)):
        table.add(0.001, seed, points=points(line))
    rise = statistics.mean(0.5 * (k - 32) for k in range(33, 65))
    mean, error = rise / 3, rise / 3  # of 0, rise and 0
    found(parity.jumps_after_half(table.load()), True, "1 of 3 networks", f"is {mean:.2f} ± {error:.2f} higher")


@of("parity")
def test_hard_without_act(table: Table) -> None:
    errors = {k: 0.0 if k < 17 else 0.3 if k < 49 else 0.5 for k in range(1, 65)}
    table.add(None, 0, points=points(dict.fromkeys(range(1, 65), 1.0), errors))
    table.add(0.01, 0, error=0.01, points=points(dict.fromkeys(range(1, 65), 2.0), {k: k / 500 for k in range(1, 65)}))
    table.add(0.01, 1, error=0.01, points=points(dict.fromkeys(range(1, 65), 2.0), {k: k / 500 for k in range(1, 65)}))
    table.add(1.0, 0, error=0.3, points=points(dict.fromkeys(range(1, 65), 1.0), errors))
    e = table.load()
    found(
        parity.hard_without(e),
        True,
        "without ACT: error 0.0 % (1-16 bits), 50.0 % (49-64), N changes by 0.00; tau from 1 on",
    )
    found(parity.best_still_rises(e), True, "1.7 % (1-16 bits), 11.3 % (49-64 bits) at tau 0.01")


@of("parity")
def test_a_tau_that_solves_the_task_is_not_too_high_for_it(table: Table) -> None:
    hard = points(dict.fromkeys(range(1, 65), 1.0), {k: k / 128 for k in range(1, 65)})
    for tau in (0.01, 0.02, 0.03, 0.04):
        table.add(tau, 0, error=0.02, points=hard)
    assert parity.hard_without(table.load()) is None
    table.add(0.04, 0, error=0.3, points=hard)
    found(parity.hard_without(table.load()), True, "tau from 0.04 on: error 6.6 % (1-16 bits), 44.1 % (49-64)")


@of("parity")
def test_what_is_said_of_every_task(table: Table) -> None:
    flags = {"command": "pondertime sweep parity --max-steps 100"}
    for seed, (few, many) in enumerate(((1.0, 9.0), (1.0, 11.0), (1.0, 40.0))):
        table.add(0.001, seed, steps=many, error=0.02, **flags)
        table.add(1.0, seed, steps=few, error=0.39 + 0.01 * seed, **flags)
        table.add(None, seed, error=0.40)
    e = table.load()
    found(shared.far_below_limit(e), False, "at most 40.00 (tau 0.001, seed 2); M is 100")
    found(shared.depends_on_tau(e), True, "2.0 % (tau 0.001) to 40.0 % ± 0.6 % (tau 1)")
    same = e._replace(act=[group._replace(rows=[replace(r, error=0.3) for r in group.rows]) for group in e.act])
    found(shared.depends_on_tau(same), False, "30.0 % (tau 0.001) to 30.0 % (tau 0.001)")
    found(shared.far_below_limit(e._replace(task="addition")), False, "M is 100, ours; the paper's is 20")
    plain = "tau 1: N 1.00, 40.0 % ± 0.6 %; without ACT 40.0 %"
    found(shared.plain_at_high_tau(e), None, plain)
    found(shared.plain_at_high_tau(e._replace(task="logic")), True, plain)
    deviation = statistics.stdev([9, 11, 40])
    found(shared.spread_of_ponder(e), True, f"of {deviation:.2f} (tau up to 0.001", "0.00 (tau from 1 on)")
    table.add(0.001, 0, steps=9.0, error=0.02, **flags)
    table.add(0.001, 2, steps=24.0, error=0.02, **flags)
    found(shared.far_below_limit(table.load()), True)
    for seed in range(3):
        table.add(0.001, seed, steps=20.0 + seed, error=0.02, **flags)
    found(shared.spread_of_ponder(table.load()), False, "of 1.00 (tau up to 0.001, mean N 21.00 ±")


@of("parity")
def test_the_spread_of_ponder_is_that_of_correct_solutions(table: Table) -> None:
    for steps, error in ((9.0, 0.02), (9.1, 0.02), (9.2, 0.02), (40.0, 0.2)):
        table.add(0.001, int(steps * 10), steps=steps, error=error)
        table.add(1.0, int(steps * 10), steps=1.0, error=0.4)
    deviation = statistics.stdev([9, 9.1, 9.2, 40])
    said = f"of {deviation:.2f} (tau up to 0.001, mean N 16.82", "0.10 (mean N 9.10 ± 0.06) among those below 5 % error"
    found(shared.spread_of_ponder(table.load()), False, *said)


@of("parity")
def test_more_ponder_at_low_tau(table: Table) -> None:
    for seed in range(2):
        for tau, steps in ((0.001, 5.0), (0.01, 3.0), (0.1, 1.0)):
            table.add(tau, seed, steps=steps + 0.1 * seed)
    said = "with N -1.00; 5.05 ± 0.05 (tau 0.001), 3.05 ± 0.05 (tau 0.01), 1.05 ± 0.05 (tau 0.1)"
    found(shared.more_ponder_at_low_tau(table.load()), True, said)
    for seed in range(2):
        table.add(0.001, seed, steps=0.5)
    found(shared.more_ponder_at_low_tau(table.load()), False, "with N 0.50;")


@of("parity")
def test_asynchronous_workers(table: Table) -> None:
    flags = {"command": "pondertime sweep parity --max-steps 100 --learning-rate 0.001"}
    theirs = {"preset": "paper", "workers": 16, **flags}
    table.errors({0.01: [0.04, 0.06], None: [0.4, 0.4]}, **flags)
    assert shared.beside_workers(table.load()) is None
    table.add(0.01, 0, error=0.08, **theirs)
    found(
        shared.beside_workers(table.load()),
        None,
        "tau 0.01: 8.0 % with 16 workers (networks: 1), 5.0 % ± 1.0 % with one (the grid)",
    )
    table.add(None, 0, error=0.5, **theirs)
    found(
        shared.beside_workers(table.load()), None, "without ACT: 50.0 % with 16 workers", "40.0 % with one (the grid)"
    )


@of("parity")
def test_a_few_asynchronous_networks_are_no_grid(table: Table) -> None:
    table.add(0.01, 0, preset="paper", workers=16, error=0.08)
    evidence = table.load()
    assert not evidence.act and not evidence.without
    found(shared.beside_workers(evidence), None, "8.0 % with 16 workers (networks: 1", "with one not run yet")
    table.add(0.1, 0, preset="paper", workers=16, error=0.08)
    assert len(table.load().act) == 2


def test_the_setting_of_a_row() -> None:
    row = make_row("parity", 0.01, 0, workers=1, command="pondertime sweep parity --learning_rate=1e-3 --max-steps 100")
    assert setting(row) == (1e-3, 100, 0, 128, None)
    assert setting(make_row("parity", 0.01, 0, command="-c")) == (4e-3, 3, 0, 128, None)
    assert setting(make_row("addition", 0.01, 0, preset="paper")) == (1e-4, 20, 0, 32, None)
    assert setting(replace(row, command=f"{row.command} --cooldown 0.2")) == (1e-3, 100, 0.2, 128, None)
    drawn = replace(row, command=f"{row.command} --init-std 0.2")
    small = make_row("addition", 0.01, 0, command="pondertime sweep addition --digits 3 --hidden-size 256")
    assert "M 20, 256 units, digits 3, preset fast" in describe([small])
    assert setting(drawn).init_std == 0.2 and "M 100, first weights of 0.2, preset" in describe([row, drawn])
    assert read_flags("a --b 'c d' --e=f --g") == {"b": "c d", "e": "f", "g": ""}
    assert read_flags("it's --b c") == {"b": "c"}
    # Flags of a task stand beside the preset's; what is no number where one is meant changes nothing.
    found = settings("pondertime train parity --bits 8 --placement scatter --clip none", FAST["parity"])
    assert (found["bits"], found["placement"], found["clip"], found["beta2"]) == (8, "scatter", 1.0, 0.99)
    both = [row, make_row("parity", 0.02, 0, workers=1, updates=20_000, command="--max-steps 50")]
    assert describe(both) == "20,000 to 160,000 updates, rate 0.001 to 0.004, M 50 to 100, preset fast"
    larger = replace(row, command=f"{row.command} --batch-size 256")
    assert describe([row, larger]).startswith("160,000 updates of 128 to 256 sequences, rate 0.001, M 100")


def test_words() -> None:
    grid = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert ranges([0.1, 0.2, 0.4, 0.5], grid) == "tau 0.1 to 0.2, 0.4 to 0.5" and ranges([], grid) == "no tau"
    assert spread_out([str(i) for i in range(9)]) == ["0", "2", "4", "6", "8"]
    shares = [Summary(0.389, 0.004), Summary(0.0005, 0), Summary(0.00049, 0.0001), Summary(0.0, 0.0)]
    assert [percent(s) for s in shares] == ["38.9 % ± 0.4 %", "0.1 %", "0.049 % ± 0.010 %", "0.0 %"]
    # An error is not shown as zero, and left out where that would take more than one digit.
    assert [percent(Summary(0.046, error)) for error in (0.0006, 0.0004, 0.00001)] == [
        "4.6 % ± 0.1 %", "4.60 % ± 0.04 %", "4.6 %"
    ]  # fmt: skip
    assert [number(Summary(2.29, error)) for error in (0.01, 0.004, 0.0)] == ["2.29 ± 0.01", "2.290 ± 0.004", "2.29"]


def test_lowest_is_a_quarter(tmp_path: Path) -> None:
    make_results(tmp_path, "sort", taus=[0.001 * i for i in range(1, 10)], seeds=1)
    assert [group.tau for group in lowest(load(tmp_path, "sort").act)] == [0.001, 0.002]


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(tmp_path / "results", "parity")
    table.errors({None: [0.39, 0.41]}, command="pondertime sweep parity | tee", commit="abc")
    docs = tmp_path / "docs"
    for folder in ("images", "tasks"):
        (docs / folder).mkdir(parents=True)
    (docs / "images" / "parity_bar.png").touch()
    page = docs / "tasks" / "parity.md"
    page.write_text("# Parity\n\n## Results beside the paper's\n\n| old |\n\n## Log\n\n- kept\n")
    (docs / "tasks" / "sort.md").write_text("# Sort\n")
    (table.folder / "note.md").write_text("The whole in short.\n")
    (table.folder / "parity-note.md").write_text("What one must know.\n")
    again = Table(table.folder / "other-weights", "parity")
    again.errors({None: [0.29, 0.31]}, commit="def")
    (docs / "images" / "other-weights").mkdir()
    (docs / "images" / "other-weights" / "parity_bar.png").touch()
    args = ["--results", str(table.folder), "--out", str(docs / "results.md")]
    main(args)
    text = (docs / "results.md").read_text()
    setting_of = "160,000 updates, rate 0.004, M 3, preset fast"
    line = "| almost 40 % | 40.0 % ± 1.0 % | 2 | [parity_bar](images/parity_bar.png) | A |"
    assert line in text and f"- A: {setting_of}: `pondertime sweep parity | tee`, commit abc\n" in text
    assert "![parity_bar](images/parity_bar.png)" in text and "| [parity](#parity) | 15 | 1 | 0 | 0 | 14 |" in text
    assert "/tmp" not in text and str(tmp_path) not in text
    assert "task's page.\n\nThe whole in short.\n\n| task | claims |" in text and text.count("in short") == 1
    assert "(tasks/parity.md).\n\nWhat one must know.\n\n| claim |" in text
    beside = text[text.index("\n## Parity: other weights\n") : text.index("\n## Logic\n")]
    link = "[parity_bar](images/other-weights/parity_bar.png)"
    assert f"| almost 40 % | not reached: ours is 30.0 % ± 1.0 % | 2 | {link} | A |" in beside
    assert "parity_plot" not in beside, "only figures that are drawn are named"
    assert f"!{link}" in beside and f"- A: {setting_of}: " in beside and "commit def" in beside
    assert "What one must know" not in beside
    assert "not run" not in beside, "a folder shows what is in it"
    filled = page.read_text()
    assert "| old |" not in filled and filled.startswith("# Parity\n") and filled.endswith("\n## Log\n\n- kept\n")
    assert "| mean error without ACT | almost 40 % | 40.0 % ± 1.0 % |" in filled
    assert (docs / "tasks" / "sort.md").read_text() == "# Sort\n"
    main(args)
    assert (docs / "results.md").read_text() == text and page.read_text() == filled, "the same results, the same page"
    (table.folder / "parity.csv").write_text("mine")
    for wrong, words in (
        (args, "parity.csv, line 1"),
        ([*args, "--preset", "slow"], "--preset: expected fast or paper"),
    ):
        with pytest.raises(SystemExit, match=f"error: .*{words}"):
            main(wrong)
    assert capsys.readouterr().out.count("67 claims, 1 with results, 1 as the paper says") == 2
