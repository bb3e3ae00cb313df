"""What the recorded commands say."""

import shlex


def read_flags(command: str) -> dict[str, str]:
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
    return found
