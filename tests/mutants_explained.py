"""Mutants that no test can kill, each with the reason; see mutation.py."""

# (file, the line before, the line after): why it makes no difference.
EXPLAINED: dict[tuple[str, str, str], str] = {
    (
        "gradstat/_fields.py",
        "@dataclass(frozen=True, slots=True)",
        "@dataclass(frozen=True, slots=False)",
    ): "slots save memory and change nothing that a program can rely on",
    (
        "gradstat/clip.py",
        "is_own = parts is not None and not spread.has_partial",
        "is_own = parts is None and not spread.has_partial",
    ): "both lists are of the same memory, and scaling takes either; one is only quicker to make",
}
