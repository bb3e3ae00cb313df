"""Kinds of characters and boundaries, on texts and values made by hand."""

import math

import numpy as np
import pytest
import torch

from pondertime import results
from pondertime.characters import best_threshold, boundaries, boundaries_of, classes, kinds_of, ratio
from pondertime.evaluate import generator, read_text
from pondertime.jobs import run_job
from pondertime.networks import build
from pondertime.runs import make_task
from pondertime.sweep import Places
from small_runs import small

TEXT = b"</title>\n<id>407</id> In 12 [[towns]], it's so. The end"


def marked(text: bytes, name: str) -> str:
    """The characters of a kind in their places, dots elsewhere."""
    shown = (chr(c) if here else "." for c, here in zip(text, kinds_of(text)[name], strict=False))
    return "".join(shown).replace("\n", "|")


def test_kinds():
    assert marked(TEXT, "letter") == "..title...id......id..In......towns....it.s.so..The.en"
    assert marked(TEXT, "ID digit") == ".............407......................................"
    assert marked(TEXT, "digit") == ".........................12..........................."
    assert marked(TEXT, "bracket") == "<......>.<..>...<...>.......[[.....]]................."
    assert marked(TEXT, "tag") == "<........<......<....................................."
    assert marked(TEXT, "newline") == "........|............................................."
    assert marked(TEXT, "comma") == ".....................................,................"
    assert np.flatnonzero(kinds_of(TEXT)["space"]).tolist() == [21, 24, 27, 38, 43, 47, 51]
    assert np.flatnonzero(kinds_of(TEXT)["full stop"]).tolist() == [46]


def test_numbers_of_pages_that_are_cut_off():
    assert marked(b"15</id> 33 <id>89.", "ID digit") == "15.............89"
    assert marked(b"15 </id> <id>x7</id>", "ID digit") == "." * 19


def test_boundaries_between_words_and_sentences():
    text = b'He said "no." Then it\'s 3.5 or Mr. X!\nend. of'
    found = boundaries_of(text)
    assert [text[a:b] for a, b in found["word"]] == [
        b" ", b' "', b'." ', b" ", b" ", b".", b" ", b" ", b". ", b"!\n", b". ",
    ]  # fmt: skip
    assert [text[a:b] for a, b in found["sentence"]] == [b'." ', b". ", b"!\n"]
    assert boundaries_of(b"the end.\n")["sentence"] == [], "what comes after the text is not known"


def test_means_by_kind_and_their_standard_errors():
    texts = [b"a,b,c", b"ab,cd", b"abcde"]
    rho = np.array([[1.0, 5, 1, 7, 9], [1, 1, 9, 1, 9], [2, 2, 2, 2, 9]])[:, :4]
    values = {"rho": rho, "loss": 2 * rho, "entropy": np.zeros_like(rho)}
    table = {row.kind: row for row in classes(texts, values, skip=0)}
    assert set(table) == {"letter", "comma"}
    comma, letter = table["comma"], table["letter"]
    assert (comma.characters, comma.sequences, comma.rho, comma.loss, comma.entropy) == (3, 2, 7, 14, 0)
    # Sums 12 and 9, counts 2 and 1: residuals -2 and 2.
    assert comma.rho_se == pytest.approx(math.sqrt(2 / 1 * 8) / 3)
    assert comma.loss_se == pytest.approx(2 * comma.rho_se)
    # Sums 2, 3, 8, counts 2, 3, 4; the mean is 13/9.
    assert letter.rho == pytest.approx(13 / 9)
    residuals = [2 - 26 / 9, 3 - 39 / 9, 8 - 52 / 9]
    assert letter.rho_se == pytest.approx(math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 9)
    assert [row.kind for row in classes(texts, values, skip=3)] == ["letter", "comma"]
    assert classes(texts, values, skip=3)[1].characters == 1


def test_a_ratio_of_one_sequence_has_no_error():
    assert ratio(np.array([3.0, 0]), np.array([2, 0])) == (1.5, 0.0)


def test_the_best_threshold_by_trying_all():
    random = np.random.default_rng(2)
    inside, outside = random.integers(3, 9, 15) / 4, random.integers(0, 7, 40) / 4
    scores = {}
    for cut in {*inside, *outside}:
        hits, alarms = sum(v >= cut for v in inside), sum(v >= cut for v in outside)
        precision, recall = hits / max(hits + alarms, 1), hits / 15
        scores[cut] = 2 * precision * recall / (precision + recall) if hits else 0
    assert scores[best_threshold(inside, outside)] == max(scores.values())


def test_f1_on_the_other_half():
    # The threshold comes from sequences 0 and 2; it is 5. Sequences 1 and 3 have three boundaries.
    texts = [b"ab cd", b"a, cd", b"ab cd", b"a b c"]
    rho = np.array([[0.0, 1, 5, 1], [0, 4, 6, 5], [0, 1, 5, 1], [0, 5, 0, 4]])
    table = {(row.kind, row.measure): row for row in boundaries(texts, {"rho": rho}, skip=0)}
    row = table["word", "rho"]
    assert (row.threshold, row.boundaries) == (5, 3)
    # Found: ", " of sequence 1 and the first space of 3; a false alarm at the c of sequence 1.
    assert (row.precision, row.recall, row.f1) == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    # Without sequence 1: one of two found, no alarm; without 3: one of one and an alarm. Both F1 are 2/3.
    assert row.f1_se == pytest.approx(0, abs=1e-12)
    always = table["word", "always"]
    # Outside are 2 characters of sequence 1 (a, c) and 2 of sequence 3 (a, b).
    assert (always.precision, always.recall) == pytest.approx((3 / 7, 1))
    assert ("sentence", "rho") not in table


def test_f1_has_a_standard_error_over_sequences():
    texts = [b"ab cd", b"ab cd", b"ab cd", b"ab cd"]
    rho = np.array([[0.0, 0, 5, 0], [0, 0, 5, 0], [0, 0, 5, 0], [0, 9, 5, 9]])
    (row,) = [r for r in boundaries(texts, {"rho": rho}, skip=0) if (r.kind, r.measure) == ("word", "rho")]
    # Tested are 1 and 3: two hits and two alarms; leaving one out gives 1/2 and 1, a jackknife of 1/4.
    assert row.f1 == pytest.approx(2 / 3)
    assert row.f1_se == pytest.approx(0.25)


def test_a_network_reads_the_excerpt():
    config = small("wikipedia", data="excerpt", length=60, hidden_size=8)
    task, network = make_task(config), build(config, make_task(config))
    table, told = read_text(network, task, sequences=70)
    again = task.sample(50, generator("cpu"), split="held-out")  # type: ignore[call-arg]
    letters = (again.input == ord(",")).sum()
    (comma,) = [row for row in table if row.kind == "comma"]
    assert comma.characters > 0 and comma.characters <= letters + 40
    with torch.no_grad():
        rho = network(again.input).ponder.rho[20:]
    assert comma.rho == pytest.approx(rho[again.input[20:] == ord(",")].mean().item(), rel=1e-2)
    assert {(row.kind, row.measure) for row in told} >= {
        ("word", measure) for measure in ("rho", "loss", "entropy", "steps", "always")
    }


def test_a_sweep_keeps_them(places: Places, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pondertime.jobs.TEXT_SEQUENCES", 60)
    monkeypatch.setattr("pondertime.evaluate.WIKIPEDIA_SEQUENCES", 10)
    job = small("wikipedia", data="excerpt", length=60, hidden_size=8, iterations=5)
    ((_, row),) = run_job(job, places)
    assert isinstance(row, results.Row)
    kept = results.read_classes(places.results, "wikipedia")[row.key]
    assert {"letter", "space", "bracket"} <= {item.kind for item in kept}
    told = results.read_boundaries(places.results, "wikipedia")[row.key]
    assert {item.measure for item in told} == {"rho", "loss", "entropy", "steps", "always"}
    results.add_row(places.results, "wikipedia", row)
    assert results.read_classes(places.results, "wikipedia") == {}
