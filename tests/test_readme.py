"""What the README and the examples show is what runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block, in order, in one namespace, in a folder of its own."""
    text = (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        # Blank lines before it, so that an error names the README's own line.
        before = "\n" * text[: block.start(1)].count("\n")
        exec(compile(before + block[1], "README.md", "exec"), namespace)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_examples(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_demo(tmp_path: Path) -> None:
    """`make demo` with few updates: everything but the learning."""
    command = [sys.executable, str(ROOT / "examples/parity/demo.py"), "1", "60"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "with ACT" in done.stdout and "49-64 bits" in done.stdout
    assert all((tmp_path / "demo" / f"{name}.png").stat().st_size > 10_000 for name in ("learning", "bits"))
