"""Write the page of results and the tables of the tasks: ``python -m pondertime.claims --out docs/results.md``."""

import argparse
import sys
from pathlib import Path

from pondertime.claims import check
from pondertime.claims.page import fill, page
from pondertime.config import TASK_NAMES, ConfigError, check_preset


def main(args: list[str] | None = None) -> None:
    """Check every claim of the paper against the stored results."""
    parser = argparse.ArgumentParser("python -m pondertime.claims", description=main.__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the result tables")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results.md"), help="the page; images and tasks lie beside it"
    )
    parser.add_argument("--preset", help="whose networks; default: the preset with most of them")
    given = parser.parse_args(args)
    try:
        preset = given.preset and check_preset(given.preset)
        found = check(given.results, preset)
        folders = sorted(path.name for path in given.results.iterdir() if path.is_dir() and path.name[0] != ".")
        others = {folder: check(given.results / folder, preset) for folder in folders}
        given.out.write_text(page(given.out.parent, given.results, found, others))
        for task in TASK_NAMES:
            path = given.out.parent / "tasks" / f"{task}.md"
            if path.exists():
                path.write_text(fill(path.read_text(), [pair for pair in found if pair[0].task == task]))
    except (ConfigError, ValueError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    run = [finding for _, finding in found if finding is not None]
    same = sum(finding.holds is True for finding in run)
    print(f"{given.out}: {len(found)} claims, {len(run)} with results, {same} as the paper says")


if __name__ == "__main__":
    main()
