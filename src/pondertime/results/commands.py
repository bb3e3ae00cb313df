"""What the recorded commands say."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from pondertime.config import Preset


@lru_cache
def read_flags(command: str) -> Mapping[str, str]:
    """The flags of a command and their values, ``--name value`` or ``--name=value``."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    found = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("_", "-")] = value if equals else after
    return MappingProxyType(found)


def settings(command: str, preset: Preset) -> dict[str, Any]:
    """How the networks of a command were trained: the settings of the preset, and its flags in their place."""
    found: dict[str, Any] = asdict(preset)
    for flag, text in read_flags(command).items():
        name = flag.replace("-", "_")
        try:
            found[name] = float(text)
        except ValueError:
            found.setdefault(name, text)
    return found
