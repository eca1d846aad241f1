"""Mutants that no test can kill, each with the reason; see mutation.py."""

_COPIES = "decides only whether a copy is made that could be spared; the words are the same"
_PACES = "the pace at which rows are summed; sums modulo 2**64 do not depend on it"

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
    (
        "gradstat/distributed/_checksum.py",
        "aligned = flat if flat.storage_offset() * flat.element_size() % word.itemsize == 0 else flat.clone()",
        "aligned = flat if flat.storage_offset() + flat.element_size() % word.itemsize == 0 else flat.clone()",
    ): _COPIES,
    (
        "gradstat/distributed/_checksum.py",
        "aligned = flat if flat.storage_offset() * flat.element_size() % word.itemsize == 0 else flat.clone()",
        "aligned = flat if flat.storage_offset() * flat.element_size() + word.itemsize == 0 else flat.clone()",
    ): _COPIES,
    (
        "gradstat/distributed/_checksum.py",
        "word = torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.int8",
        "word = torch.int32 if size % 4 == 0 else torch.int16 if size + 2 == 0 else torch.int8",
    ): "shorter words tell the same tensors apart, and are the same on all ranks; they only take longer",
    ("gradstat/distributed/_checksum.py", '_ROWS_AT_ONCE = {"cpu": 16}', '_ROWS_AT_ONCE = {"cpu": 17}'): _PACES,
    ("gradstat/distributed/_checksum.py", "_ROWS_AT_ONCE_ELSEWHERE = 1024", "_ROWS_AT_ONCE_ELSEWHERE = 1025"): _PACES,
    (
        "gradstat/distributed/_checksum.py",
        "@functools.lru_cache(maxsize=16)",
        "@functools.lru_cache(maxsize= 17)",
    ): "seventeen devices in one process; weights are made again, and are the same",
    (
        "gradstat/distributed/replicas.py",
        "(first, most), *others = Counter(value_of.values()).most_common() or [(None, 0)]",
        "(first, most), *others = Counter(value_of.values()).most_common() or [(None, 1)]",
    ): "of nothing there are no others to compare the number with",
    ("gradstat/distributed/origin.py", "@final", "class OriginWatch:"): "for type checkers only",
    (
        "gradstat/distributed/origin.py",
        "first = torch.full((len(self._names) + 1,), _NEVER, dtype=torch.int64, device=device)",
        "first = torch.full((len(self._names) + 2,), _NEVER, dtype=torch.int64, device=device)",
    ): "one parameter more that was never bad, behind all others",
    (
        "gradstat/distributed/origin.py",
        'counts = torch.zeros(0, len(_COUNTS), dtype=torch.float64, device="cpu")',
        'counts = torch.zeros( 1, len(_COUNTS), dtype=torch.float64, device="cpu")',
    ): "those of a rank that saw nothing, which is an error before anybody looks at them",
    (
        "gradstat/distributed/origin.py",
        "@never_traced",
        "def _see_accumulated(self) -> None:",
    ): "traced, it gives the same rows, and breaks the graph more often",
}
