"""The command line: reads the arguments, runs a command of ``commands``, says in one line what went wrong."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import tyro

from pondertime import __version__
from pondertime.commands.bench import Bench
from pondertime.commands.data import Data
from pondertime.commands.evaluate import Evaluate
from pondertime.commands.figures import Figures
from pondertime.commands.sweep import Sweep
from pondertime.commands.train import Train
from pondertime.config import ConfigError, Interrupted, OutOfTime, RunError
from pondertime.show import say

COMMANDS: dict[str, Callable[..., Any]] = {
    "train": Train,
    "sweep": Sweep,
    "evaluate": Evaluate,
    "figures": Figures,
    "data": Data,
    "bench": Bench,
}


def parse(args: list[str]) -> Any:
    """The command that the arguments ask for; a mistake ends in one line."""
    if args[0] == "--version":
        say(f"pondertime {__version__}")
        raise SystemExit
    if args[0] not in COMMANDS and not args[0].startswith("-"):
        fail(f"unknown command {args[0]!r}: expected one of {', '.join(COMMANDS)}", 2)
    caught = io.StringIO()
    try:
        with contextlib.redirect_stderr(caught):
            return tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="pondertime",
                description="Recurrent networks that learn how long to think.",
                args=args,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as leave:
        if leave.code:
            command = f"pondertime {args[0]}" if args[0] in COMMANDS else "pondertime"
            fail(f"{squeeze(caught.getvalue(), command)}; see {command} --help", 2)
        raise


def squeeze(box: str, command: str) -> str:
    """What tyro says is wrong, without its box, title and help, and which options of the command may be meant."""
    text = re.sub("[│╭╮╰╯]", "", box).replace("─", "-")
    parts = [" ".join(part.split()) for part in re.split("-{5,}", text)]
    said = parts[1].removeprefix("Error parsing ").removesuffix(" Expected 1 values.").removesuffix(" (required)")
    said = re.sub(r" \(applied to [^)]*\)| Arguments are applied to .*", "", said)
    hints = re.findall("(--[a-z0-9-]+)(.*?)(?= --|$)", " ".join(parts[2:]).replace(f"in {command} --help", "HERE"))
    meant = " or ".join(dict.fromkeys(name for name, text in hints if "HERE" in text))
    return said.removesuffix(".") + (f"; perhaps you meant {meant}" if meant else "")


def fail(message: str, code: int = 1) -> None:
    """Print one line and leave."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(code)


def main(args: list[str] | None = None) -> None:
    """Run a command. What a person can mend ends with one line; anything else is a bug and shows its trace."""
    args = sys.argv[1:] if args is None else args
    try:
        action = parse(args or ["--help"])
        action.run()
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        raise SystemExit(0 if isinstance(stop, OutOfTime) else 130) from None
    except (ConfigError, RunError) as error:
        fail(str(error))
    except BrokenPipeError:
        # The reader of our output has left; nothing more is to be written to it, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        fail("not enough memory; try a smaller --batch-size, --hidden-size or --length")


def out_of_memory(error: Exception) -> bool:
    """Whether torch could not get its memory; on a CPU only the message tells."""
    words = ("out of memory", "allocate memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
