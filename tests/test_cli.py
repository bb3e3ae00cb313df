"""The command line as a hostile newcomer uses it: wrong in every way, interrupted, on a full disk; then as meant."""

import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pondertime.cli import COMMANDS, main
from pondertime.runs import RunFolder, write_json
from pondertime.show import show_trace
from pondertime.train import train
from small_runs import assert_same_run, contents, processes, small, trained, updates

SMALL = "--bits 8 --hidden-size 16 --batch-size 16 --max-steps 10 --log-every 20 --iterations"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, damaged copies of it, and files that are in the way."""
    home = tmp_path_factory.mktemp("home")
    run = trained(home / "run").path
    for name in ("cut", "nonsense", "resized", "foreign", "early", "state"):
        shutil.copytree(run, home / name)
    model = home / "cut" / "checkpoint" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-100])
    (home / "nonsense" / "config.json").write_text("{nonsense")
    write_json(home / "resized" / "config.json", small(hidden_size=8).to_json())
    write_json(home / "foreign" / "config.json", small("logic").to_json())
    shutil.rmtree(home / "early" / "checkpoint")
    (home / "early" / "result.json").unlink()
    (home / "state" / "checkpoint" / "state.json").write_text('{"updates":')
    for name in ("photos", "empty", "tables"):
        (home / name).mkdir()
    (home / "photos" / "cat.jpg").write_text("mine")
    (home / "tables" / "parity.csv").write_text("mine\n")
    (home / "file").write_text("mine")
    (home / "short.txt").write_text("a short text" * 20)
    (home / "text.gz").write_bytes(gzip.compress(b"packed"))
    (home / "broken.gz").write_bytes(gzip.compress(os.urandom(2000))[:900])
    return home


@pytest.fixture
def home(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the current folder."""
    shutil.copytree(prepared, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.delenv("PONDERTIME_DATA", raising=False)
    return tmp_path / "home"


WRONG = [
    line.split(" => ")
    for line in f"""
frobnicate => unknown command 'frobnicate': expected one of train, sweep
--frobnicate => --frobnicate; see pondertime --help
train => Missing from pondertime train: TASK parity, logic
train parity --members 0 => --members: expected a number of at least 1, got 0
train parity --members 2 --workers 2 => --members: networks trained at once are synchronous; use --workers 1
train parity --members 2 --backend compact => --members: networks are trained at once by the fused backend
train chess => unknown task 'chess': expected one of parity, logic, addition, sort, wikipedia
train parity logic => logic; see pondertime train --help
train parity --iteration 3 => perhaps you meant --iterations
train parity --tau x => --tau: expected a number, got 'x'; see pondertime train --help
train parity --tau => Missing value for argument '--tau'
train parity --tau -1 => --tau: expected a number of at least 0, got -1.0
train parity --tau nan => --tau: expected a number of at least 0, got nan
train parity --seed -1 => --seed: expected a number from 0 to 2^63 - 1, got -1
train parity --seed 1.5 => --seed: expected a whole number, got '1.5'
train parity --seed 99999999999999999999 => --seed: expected a number from 0
train parity --bits 0 => --bits: expected a number of at least 1, got 0
train parity --data short.txt => parity has no option --data
train logic --bits 8 => logic has no option --bits
train addition --digits 0 => --digits: expected a number of at least 1, got 0
train addition --digits 19 => digits: expected sums below 2^63, got 5 numbers of 19 digits
train sort --length 10 => sort has no option --length
train sort --separation 3 => --separation: expected a number from 0 to 0.1, got 3.0
train parity --preset foo => --preset: expected fast or paper, got 'foo'
train parity --placement foo => --placement: expected prefix or scatter, got foo
train parity --device foo => --device: expected cpu, cuda or auto, got 'foo'
train parity --device meta => --device: expected cpu, cuda or auto, got 'meta'
train parity --backend foo => backend: expected one of 'auto', 'reference'
train parity --iterations 0 => --iterations: expected a number of at least 1, got 0
train parity --hidden-size -4 => --hidden-size: expected a number of at least 1, got -4
train parity --hidden-size 1000000000 => not enough memory; try a smaller --batch-size, --hidden-size
train parity --workers 0 => --workers: expected a number of at least 1
train parity --max-steps 0 => --max-steps: expected a number of at least 1
train parity --epsilon 1 => --epsilon: expected a number between 0 and 1, got 1.0
train parity --halt-bias inf => --halt-bias: expected a finite number, got inf
train parity --learning-rate 0 => --learning-rate: expected a positive number, got 0.0
train parity --learning-rates 1,x => --learning-rates: expected numbers such as 0.1,0.01, got '1,x'
train parity --members 2 --learning-rates 1,-1 => --learning-rates: expected positive numbers, got -1.0
train parity --members 2 --learning-rates 1,2,3 => --learning-rates: expected 2 or more, up to --members 2, got 3
train parity --members 2 --learning-rates 1 => --learning-rates: expected 2 or more, up to --members 2, got 1
train parity --members 2 --learning-rates 1,1 => --learning-rates: expected different numbers such as 0.1,0.01
train parity --members 2 --learning-rates 1,2 --learning-rate 1 => they take no --learning-rate
train parity --clip 0 => --clip: expected a positive number, got 0.0
train parity --cooldown 2 => --cooldown: expected a share from 0 to 1, got 2.0
train parity --init-std 0 => --init-std: expected a positive number, got 0.0
train parity --tau-warmup -1 => --tau-warmup: expected 0 or more, got -1
train parity --until-error 5 => --until-error: expected a share between 0 and 1, got 5.0
train parity --max-minutes 0 => --max-minutes: expected a positive number, got 0.0
train parity --precision half => --precision: expected auto, float32 or bfloat16, got 'half'
train parity --precision bfloat16 --device cpu => --precision: products in bfloat16 are made on a GPU
train parity --no-act --tau 0.1 => --no-act trains without ACT: it takes neither --tau nor --force-steps
train parity --force-steps 2 --tau 0.1 => --force-steps makes a fixed number of updates: it takes no --tau
train parity --force-steps 200 --max-steps 100 => --force-steps: expected at most --max-steps 100, got 200
train wikipedia => data/enwik8: enwik8 is not there; fetch it with `pondertime data enwik8`
train wikipedia --data missing => missing: no such file; expected enwik8, excerpt or the path of a text
train wikipedia --data photos => photos: no such file
train wikipedia --data text.gz => text.gz: a gzip archive; unpack it first
train wikipedia --data short.txt => data: expected more than 500 bytes to train in short.txt, got 228
train parity --out file => file: expected a run folder, but it is a file
train parity --out file/run => file/run: Not a directory
train parity --runs file => Not a directory
train parity --out photos => photos: not a run folder, and not empty (it holds cat.jpg)
train parity --out run => run: this run has batch_size = 16, asked for 128; only
train logic --out run => run: this run has task = parity, asked for logic; only --iterations may grow
train parity {SMALL} 60 --tau 0.5 --out run => run: this run has tau = 0.003, asked for 0.5; only
train parity {SMALL} 80 --out cut => cut/checkpoint: not a whole checkpoint (
train parity {SMALL} 80 --out state => state/checkpoint: not a whole checkpoint (state/checkpoint/state.json: cannot
train parity {SMALL} 80 --out nonsense => nonsense/config.json: cannot be read (
train parity {SMALL} 80 --hidden-size 8 --out resized => resized/checkpoint: its weights do not fit the run's config
evaluate => Missing from pondertime evaluate: RUN
evaluate missing => missing: no run here (there is no config.json)
evaluate file => file: no run here
evaluate empty => empty: no run here
evaluate early => early: no checkpoint yet
evaluate cut => cut/checkpoint: not a whole checkpoint
evaluate nonsense => nonsense/config.json: cannot be read
evaluate resized => resized/checkpoint: its weights do not fit the run's config (
evaluate foreign => foreign/checkpoint: its weights do not fit the run's config (
evaluate run --sequences 0 => --sequences: expected a number of at least 1, got 0
evaluate run --device tpu => --device: expected cpu, cuda or auto, got 'tpu'
evaluate run --sequences 9 --results file => file: File exists
evaluate run --sequences 9 --results tables => the result tables cannot take it: tables/parity.csv, line 1
sweep parity --taus a,b => --taus: expected numbers such as 0.1,0.01, got 'a,b'
sweep parity --taus 0.1,0.1 => --taus: expected different numbers such as 0.1,0.01
sweep parity --taus 0.1,-1 => --tau: expected a number of at least 0, got -1.0
sweep parity --seeds 0 => --seeds: expected a number of at least 1, got 0
sweep parity --seeds -3 => --seeds: expected a number of at least 1, got -3
sweep parity --processes 0 => --processes: expected a number of at least 1, got 0
sweep parity --max-minutes 0 => --max-minutes: expected a positive number, got 0.0
sweep parity --precision tf32 => --precision: expected auto, float32 or bfloat16, got 'tf32'
sweep parity --engine cloud => 'cloud'
sweep parity --seed 3 => perhaps you meant --seeds; see
sweep parity --tau 3 => perhaps you meant --tau-warmup or --taus; see
sweep parity --results tables => tables/parity.csv, line 1: expected the columns
sweep parity --runs file --taus 0.1 --seeds 1 => Not a directory
figures --only foo => --only: no figure starts with 'foo'; they are rnn_diagram
figures --only parity_bar => 1 of 1 figures have no results yet in results
figures --only parity_bar --results file => file
figures --only parity_bar --results tables => tables/parity.csv, line 1: expected the columns
figures --only rnn --out file => file: File exists
figures --preset foo => --preset: expected fast or paper, got 'foo'
data enwik9 => 'enwik9'
data --from missing => missing: No such file or directory
data --from photos => photos: Is a directory
bench --device cuda => --device: there is no CUDA device here
bench --device tpu => --device: expected cpu, cuda or auto, got 'tpu'
data --from short.txt => short.txt: expected 100,000,000 bytes of enwik8, got 240
data --from broken.gz => broken.gz: a damaged archive (
""".strip().splitlines()
]


def fails(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a wrong command says: one line on stderr, no trace, a code that is not 0, every file as it was."""
    before = contents(Path.cwd())
    with pytest.raises(SystemExit) as leave:
        main(args)
    assert leave.value.code not in (0, None)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.endswith("\n") and said.count("\n") == 1, said
    after = contents(Path.cwd())
    assert {k: after.get(k) for k in before} == before
    return said


@pytest.mark.parametrize(("command", "words"), WRONG, ids=[command for command, _ in WRONG])
def test_wrong_invocations(home: Path, capsys: pytest.CaptureFixture[str], command: str, words: str):
    assert words in fails(command.split(), capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("command", ["train parity", "sweep parity", "evaluate run"])
def test_no_gpu(home: Path, capsys: pytest.CaptureFixture[str], command: str):
    assert fails([*command.split(), "--device", "cuda"], capsys) == "error: --device: there is no CUDA device here\n"


def test_gpus(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "there is no cuda:2 here, only 2" in fails(["train", "parity", "--device", "cuda:2"], capsys)
    wrong = ["train", "parity", "--device", "cuda", "--preset", "paper"]
    assert "the workers of Hogwild share memory on the CPU" in fails(wrong, capsys)


@pytest.mark.parametrize("command", [f"train parity {SMALL} 80 --out run", "evaluate run"])
def test_a_backend_that_cannot_serve(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
):
    monkeypatch.setattr("pondertime.backends.why_not_fused", lambda *args: "it is Sunday")
    assert "backend 'fused' cannot serve this call: it is Sunday" in fails(
        [*command.split(), "--backend", "fused"], capsys
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write(home: Path, capsys: pytest.CaptureFixture[str]):
    (home / "empty").chmod(0o500)
    assert "Permission denied" in fails(["train", "parity", "--out", "empty/run"], capsys)


def run_limited(args: list[str], folder: Path, size: int) -> None:
    """A command with a limit to the size of files, which is what a full disk looks like."""
    os.chdir(folder)
    torch.set_num_threads(1)
    for name, fd in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder.parent / name, os.O_WRONLY | os.O_CREAT), fd)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    main(args)


@pytest.mark.parametrize(
    ("size", "log_every", "words"),
    [(300, 20, "File too large"), (1500, 100, "cannot be written ("), (9000, 1, "File too large")],
    ids=["config", "weights", "metrics"],
)
def test_a_full_disk_loses_nothing(home: Path, size: int, log_every: int, words: str):
    folder = trained(home / "other", small(log_every=log_every, iterations=30))
    longer = small(log_every=log_every, iterations=200)
    before = contents(home)
    args = f"train parity {SMALL} 200 --log-every {log_every} --out other".split()
    process = processes().Process(target=run_limited, args=(args, home, size))
    process.start()
    process.join()
    assert process.exitcode == 1
    *first, said = (home.parent / "err").read_text().splitlines()
    # Where the config cannot be written, nothing goes on.
    assert first == ["parity-tau0.003-seed1: goes on from iteration 30"] * (log_every != 20)
    assert said.startswith("error: ") and words in said
    after = contents(home)
    assert all(after[k] == v for k, v in before.items() if not k.startswith("other/"))
    assert updates(folder) >= 30 and folder.result() is not None
    train(longer, folder)
    assert_same_run(folder, trained(home / "unbroken", longer))


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_and_the_same_command_again(home: Path, capsys: pytest.CaptureFixture[str], workers: int):
    args = f"train parity {SMALL} 100000 --out new --workers {workers}".split()
    code = "import torch; torch.set_num_threads(1); from pondertime.cli import main; main()"
    command = [sys.executable, "-c", code, *args]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        while not (home / "new" / "metrics.jsonl").exists() or not (home / "new" / "metrics.jsonl").read_text():
            time.sleep(0.02)
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("stopped at iteration ")
    assert said.endswith("; checkpoint in new/checkpoint; the same command goes on\n") and "Trace" not in said
    done = updates(RunFolder(home / "new"))
    assert done > 0
    with pytest.raises(SystemExit) as leave:
        main([*args, "--max-minutes", "0.003"])
    assert leave.value.code == 0
    assert "stopped by --max-minutes at iteration" in capsys.readouterr().err
    assert updates(RunFolder(home / "new")) >= done
    main(["evaluate", "new", "--sequences", "20"])
    assert "its training has not ended" in capsys.readouterr().out


def test_help_needs_no_torch():
    code = f"""
import contextlib, io, sys
from pondertime.cli import main

for args in [[], ["--help"], *([name, "--help"] for name in {list(COMMANDS)})]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main(args)
        except SystemExit as leave:
            assert leave.code == 0, args
    assert out.getvalue().startswith("usage: pondertime"), args
    assert "None" not in out.getvalue(), args
assert "torch" not in sys.modules and "matplotlib" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_from_training_to_a_figure(home: Path, capsys: pytest.CaptureFixture[str]):
    main(["train", "parity", *SMALL.split(), "30", "--no-act"])
    said = capsys.readouterr().out
    run = Path("runs/parity-noact-seed1")
    assert said.startswith(f"parity-noact-seed1: preset fast, cpu, {run}\nparity-noact-seed1: error ")
    assert "ponder 1.00 (rho 2.00)" in said
    main(["evaluate", str(run), "--sequences", "100", "--results", "results"])
    said = capsys.readouterr().out
    assert "difficulty" in said and "\n  steps  1\n" in said
    measured = json.loads((run / "evaluation.json").read_text())
    assert measured["sequences"] == 100 and len(measured["difficulty"]) == 8 and len(measured["traces"]) == 3
    main(["figures", "--only", "parity_bar", "--out", "drawn"])
    assert capsys.readouterr().out == "parity_bar: drawn/parity_bar.png, .svg\n"
    assert (home / "drawn" / "parity_bar.png").stat().st_size > 1000


def test_a_sequence_is_shown_step_under_step(capsys: pytest.CaptureFixture[str]):
    shown: dict[str, Any] = {"input": ["7", "123"], "target": ["", "130"], "output": ["", "131"], "steps": [2, 11]}
    show_trace(shown)
    assert capsys.readouterr().out.splitlines() == [
        "  input  7 123",
        " target  - 130",
        " output  - 131",
        "  steps  2 11",
        "",
    ]
    show_trace({**shown, "input": ["7", "x" * 150]})  # no room for columns
    assert capsys.readouterr().out.splitlines()[1:4] == [" target  - 130", " output  - 131", "  steps  2 11"]


def test_a_bug_shows_its_trace(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pondertime.commands.evaluate.describe", lambda *args: [][0])
    with pytest.raises(IndexError):
        main(["evaluate", "run", "--sequences", "9"])
