"""``python -m pondertime``: the command line, where its script is not on the path."""

from pondertime.cli import main

if __name__ == "__main__":
    main()
