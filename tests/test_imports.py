"""Imports point one way, as in DESIGN section 2, and the library needs nothing but torch and numpy."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import pondertime

ROOT = Path(pondertime.__file__).parent
# A module may import those of its own line and of the lines above it. Folders count as one module.
LAYERS = [
    {"halting", "cells", "config", "data", "progress", "untraced"},
    {"sequences", "plain", "reference", "results", "characters"},
    {"compact", "fused"},
    {"backends"},
    {"act"},
    {"tasks"},
    {"batches", "networks"},
    {"ensemble"},
    {"runs", "learner", "train", "hogwild", "evaluate"},
    {"sweep", "jobs", "engines", "figures", "report", "bench", "checkpoints", "claims"},
    {"web", "flags", "show", "commands", "cli", "__main__"},
]
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
TRAIN = {"learner", "train", "hogwild", "ensemble", "sweep", "jobs", "engines"}
READ = {"figures", "claims", "report"}


def home(path: Path) -> str:
    """The module, or the folder, that a source file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
MODULES = {home(path) for path in FILES}


def imported(path: Path, *, top_level: bool = False) -> set[str]:
    """The modules of pondertime that a file imports; a public name counts as ``act``, where they all meet."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports inside the package are absolute, got a relative one"
            whole = node.module == "pondertime"
            names |= {f"pondertime.{alias.name}" for alias in node.names} if whole else {node.module or ""}
    parts = [name.split(".") for name in names if name.split(".")[0] == "pondertime"]
    found = {part[1] if len(part) > 1 else "act" for part in parts}
    found = {name if name in MODULES else "act" for name in found if not name.startswith("__")}
    return found - {home(path)}


def graph(*, top_level: bool = False) -> dict[str, set[str]]:
    """What each module imports, anywhere or when it is loaded."""
    edges: dict[str, set[str]] = {module: set() for module in MODULES}
    for path in FILES:
        edges[home(path)] |= imported(path, top_level=top_level)
    return edges


def test_every_module_has_a_place() -> None:
    unknown = sorted(MODULES - RANK.keys())
    assert not unknown, f"{unknown}: new in src/pondertime; give them a layer in LAYERS of tests/test_imports.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    wrong = sorted(m for m in imported(path) if RANK.get(m, 0) > RANK.get(home(path), len(LAYERS)))
    assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}, which are built on it"


def test_no_module_imports_itself_by_way_of_others() -> None:
    tuple(graphlib.TopologicalSorter(graph(top_level=True)).static_order())


@pytest.mark.parametrize("reader", sorted(READ & MODULES))
def test_what_reads_results_does_not_train(reader: str) -> None:
    edges, seen, ahead = graph(), set(), {reader}
    while ahead:
        seen |= ahead
        ahead = set().union(*(edges[module] for module in ahead)) - seen
    assert not seen & TRAIN, f"{reader} reaches {sorted(seen & TRAIN)}"


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["pondertime", "pondertime.config", "pondertime.claims", "pondertime.characters"])
def test_torch_is_not_loaded_before_it_is_needed(module: str) -> None:
    run(f"import sys, {module}; assert 'torch' not in sys.modules")


def test_the_library_needs_only_torch_and_numpy() -> None:
    run(
        '''
import sys

class WithoutExtras:
    """Finds what the usual finders find, less the packages that a bare installation lacks."""

    missing = {"rich", "tyro", "safetensors", "matplotlib", "hypothesis", "torchrecurrent"}
    finders = list(sys.meta_path)

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.missing:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)

sys.meta_path[:] = [WithoutExtras()]
import torch
import pondertime as pt

for name in pt.__all__:
    getattr(pt, name)
y, state, ponder = pt.ACT(torch.nn.LSTMCell(3 + 1, 8), 2)(torch.randn(5, 2, 3))
(y.sum() + ponder.cost.mean()).backward()
try:
    import rich
except ModuleNotFoundError:
    sys.exit(0)
sys.exit("rich is there")
'''
    )


def test_public_names() -> None:
    assert set(pondertime.__all__) <= set(dir(pondertime))
    with pytest.raises(AttributeError, match="module 'pondertime' has no attribute 'nothing'"):
        _ = pondertime.nothing
