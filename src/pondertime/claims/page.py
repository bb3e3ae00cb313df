"""The page of results: the paper's claims in tables, our numbers beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from string import ascii_uppercase

from pondertime.claims import Claim, Finding, answer
from pondertime.claims.settings import describe, origins
from pondertime.claims.words import figures_of
from pondertime.config import TASK_NAMES

INTRODUCTION = """# Results beside the paper's

What the experiments of [Graves 2016](https://arxiv.org/abs/1603.08983) say, claim by claim, with the paper's number and
ours. This page is made by `make results` from the tables in `results/`. Grids beside the main one of a task have
sections of their own; their rows are not in the counts. What differs between the paper's setting and ours is said on
each task's page.
"""

HOW_TO_READ = """## How to read it

- tau is the time penalty, the price of an update. N is the number of updates at an input step, at most M, and what
  "ponder" means here where nothing else is said; rho = N + R is the paper's ponder, R the probability that is left for
  the last update. An error is a share of sequences, any mistake in one counts.
- A number is a mean with its standard error over networks, which differ in their seed (and in tau, where a claim is
  about several time penalties). A single network has none, but for kinds of characters and boundaries, where it is over
  sequences; nor is one given that would be shown as zero with one digit more, or where networks differ in tau alone.
- *Not reached* means that our number is not what the paper says, also where it is the better one.
- "About", "around" and "roughly" are met within a fifth of the paper's number, "almost" within a tenth, or within two
  standard errors.
- An order, such as "faster with lower tau", is met if the rank correlation is beyond 0.3 and beyond two standard
  errors, over the grid and over the time penalties that solve the task ("where solved": with less than half the error
  of the networks without ACT). It is computed for every seed with three quarters of the time penalties or more (and at
  least three) and averaged; one seed alone tells nothing.
- "The lowest tau" is the lowest quarter of the grid; an error "at high tau" is of the highest quarter, as far
  as it does not solve the task. "Better networks" are those within two standard errors of the best time penalty.
- "Linear" is a correlation above 0.95 in most networks; "sublinear growth" goes on in the longer half of the sequences.
- A spread over seeds is large from a tenth of the mean on, if it is twice that of the highest taus; asked of the
  networks below 5 % error, where a tau has three of them. "Far below M" is below a quarter of it. An error is sensitive
  to tau if it doubles between two of them. Ponder is "surprisingly high" for one gate if it is higher than for five.
- In the figures faint lines and small dots are networks, bold lines and large dots means over seeds, bars and ellipses
  their standard errors. Along text, grey is white space.
- A pause is 0.1 more of rho; rho tells boundaries only if N does, too.
- The letter in the last column leads to the setting, the command and the commit, below the table. A setting names the
  updates made by all workers, Adam's learning rate, the largest N that is allowed (M) and the preset, and, where they
  are not the paper's, the minibatch, the units of the network and the size of the task.
"""

Checked = Sequence[tuple[Claim, Finding | None]]

# Figures that a task's section shows, where docs/images has them.
KINDS = ("bar", "plot", "difficulty", "sequence", "sequence_2")


def page(docs: Path, results: Path, found: Checked, others: Mapping[str, Checked]) -> str:
    """The whole page, which lies in ``docs``; ``others``: what the tables in folders of ``results`` say, by folder."""
    sections = []
    for task in TASK_NAMES:
        sections.append(section(task, [pair for pair in found if pair[0].task == task], docs, results))
        for folder, other in others.items():
            own = [pair for pair in other if pair[0].task == task and pair[1] is not None]
            if own:
                sections.append(section(task, own, docs, results, folder))
    return "\n".join([INTRODUCTION, *note(results / "note.md"), overview(found), HOW_TO_READ, *sections])


def overview(found: Checked) -> str:
    """How many claims of each task hold."""
    lines = [
        "| task | claims | as the paper says | not reached | without a number to compare | not run yet |",
        "|---" * 6 + "|",
    ]
    for task in TASK_NAMES:
        own = [finding for claim, finding in found if claim.task == task]
        kinds = [None if finding is None else finding.holds for finding in own if finding is not None]
        counts = (kinds.count(True), kinds.count(False), kinds.count(None), own.count(None))
        lines.append(f"| [{task}](#{task}) | {len(own)} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines) + "\n"


def section(task: str, found: Checked, docs: Path, results: Path, folder: str = "") -> str:
    """One task: the table, where its networks come from, and the figures; ``folder``: of those in it alone."""
    letters: dict[str, str] = {}
    title = task.capitalize() + (f": {folder.replace('-', ' ')}" if folder else "")
    lines = [f"## {title}", "", f"The task, and where our setting differs: [{task}](tasks/{task}.md).", ""]
    lines += note(results / folder / f"{task}-note.md")
    lines += ["| claim | the paper | ours | networks | figure | setting |", "|---" * 6 + "|"]
    for claim, finding in found:
        networks = letter = ""
        if finding is not None:
            networks, made = str(len(finding.rows)), f"{describe(finding.rows)}: {origins(finding.rows)}"
            letter = letters.setdefault(made, ascii_uppercase[len(letters)])
        cells = (claim.text, claim.paper, answer(finding), networks, figure(claim.figure, docs, folder), letter)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", *(f"- {letter}: {made}" for made, letter in letters.items())]
    name = figures_of(task)
    for kind in KINDS:
        image = f"{name}_{kind}"
        if (docs / _path(image, folder)).exists():
            lines += ["", f"![{image}]({_path(image, folder)})"]
    return "\n".join(lines).rstrip() + "\n"


def note(path: Path) -> list[str]:
    """What a reader must know of the tables beside their numbers and commands, where somebody has written it."""
    return [path.read_text().strip(), ""] if path.exists() else []


def fill(text: str, found: Checked) -> str:
    """A task's page with our numbers in its section of results; what stands around it is left as it is."""
    before, heading, rest = text.partition("\n## Results beside the paper's\n")
    if not heading:
        return text
    _, following, after = rest.partition("\n## ")
    lines = ["", "| claim | the paper | ours |", "|---|---|---|"]
    lines += [f"| {claim.text} | {claim.paper} | {answer(finding)} |" for claim, finding in found]
    task = found[0][0].task
    lines += ["", f"Networks, settings, commands and commits: [results](../results.md#{task}).", ""]
    return before + heading + "\n".join(lines) + following + after


def figure(name: str, docs: Path, folder: str) -> str:
    """The name of a figure, linked where it is drawn; of a grid beside the main one only those are named."""
    if (docs / _path(name, folder)).exists():
        return f"[{name}]({_path(name, folder)})"
    return "" if folder else name


def _path(figure: str, folder: str) -> str:
    return PurePosixPath("images", folder, f"{figure}.png").as_posix()
