"""Mutants that no test can kill, each with the reason; see mutation.py."""

# (file, the line before, the line after): why it makes no difference.
EXPLAINED: dict[tuple[str, str, str], str] = {}
