"""The commands of the command line: a frozen dataclass each, whose fields are its flags.

torch is imported by a command when it runs, so help is there at once.
"""
