"""Mutation testing: cosmic-ray changes the code in one place at a time, and the tests have to fail (`make mutate`).

Each comparison, arithmetic operator and number is changed once, to the next one. A mutant that survives all tests must
be listed in `EXPLAINED`. Any other survivor is an error, and so is an explanation of a mutant that did not survive.
Each core has a copy of the tree, and a process that has imported torch and pytest and is forked for every mutant.
``--only clip`` tries the files with "clip" in their path.
"""

import argparse
import difflib
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch.distributed.tensor  # noqa: F401  imported here once, and not again for every mutant
from cosmic_ray.commands import init
from cosmic_ray.mutating import apply_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).resolve().parent.parent
COPIES = ROOT / "build" / "mutation"
FORK = multiprocessing.get_context("fork")
# The tests that have to detect a change in a file, those that detect most first.
TESTS = {
    "gradstat/_fields.py": ("fields", "report", "distributed"),
    "gradstat/clip.py": ("clip", "every_clip", "total_norm", "host_path", "ops", "compiling", "distributed"),
    "gradstat/distributed/_checksum.py": ("replicas",),
    "gradstat/distributed/batches.py": ("replicas",),
    "gradstat/distributed/origin.py": ("origin",),
    "gradstat/distributed/replicas.py": ("replicas",),
}
# The operator | appears in annotations only, which are not evaluated here.
OPERATORS = re.compile(
    r"core/(?!Replace\w+Operator_)|\w+/\w+_(Add_Sub|(?!BitOr)\w+_Add|Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt"
    r"|Is_IsNot|IsNot_Is|USub_UAdd|Delete_\w+)$"
)
# Code that only type checkers read, or that checks what the surrounding code already guarantees.
WITHOUT_EFFECT = re.compile(r"TYPE_CHECKING|strict=True")
SECONDS = 400.0  # a mutant that takes longer counts as detected: it hangs

_COPIES = "decides only whether a copy is made that could be spared; the words are the same"
_PACES = "the pace at which rows are summed; sums modulo 2**64 do not depend on it"
# Why a surviving mutant makes no difference, by the changed line, or the deleted one, without spaces.
EXPLAINED = {
    "@dataclass(frozen=True,slots=False)": "slots save memory and change nothing that a program can rely on",
    "aligned=flatifflat.storage_offset()+flat.element_size()%word.itemsize==0elseflat.clone()": _COPIES,
    "aligned=flatifflat.storage_offset()*flat.element_size()+word.itemsize==0elseflat.clone()": _COPIES,
    "word=torch.int32ifsize%4==0elsetorch.int16ifsize+2==0elsetorch.int8": "shorter words only take longer",
    '_ROWS_AT_ONCE={"cpu":17}': _PACES,
    "_ROWS_AT_ONCE_ELSEWHERE=1025": _PACES,
    "@functools.lru_cache(maxsize=17)": "seventeen devices in one process; weights are made again, and are the same",
    "(first,most),*others=Counter(value_of.values()).most_common()or[(None,1)]": "nothing differs from nothing",
    "@final": "for type checkers only",
    'counts=torch.zeros(1,len(_COUNTS),dtype=torch.float64,device="cpu")': "an error before anybody looks at them",
    "@never_traced": "traced, it gives the same rows, and breaks the graph more often",
}


def changed_line(old: str, new: str) -> str:
    """The first line that a mutant changes, as changed, or the line it deletes, without spaces."""
    before, after = ([line.replace(" ", "") for line in text.splitlines()] for text in (old, new))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:]]
    return next((line[2:] for line in changes if line[0] == "+"), changes[0][2:])


def mutants_of(file: str) -> list[MutationSpec]:
    lines = Path(file).read_text().splitlines()

    def is_tried(mutation: MutationSpec) -> bool:
        is_next = mutation.operator_name != "core/NumberReplacer" or mutation.occurrence % 2 == 0
        is_read = not WITHOUT_EFFECT.search(lines[mutation.start_pos[0] - 1])
        return is_next and is_read and bool(OPERATORS.match(mutation.operator_name))

    with use_db("mutants.sqlite", WorkDB.Mode.create) as work:
        init([Path(file)], work, {})
        return [item.mutations[0] for item in work.pending_work_items if is_tried(item.mutations[0])]


def enter(copies: SimpleQueue) -> None:
    """Each worker imports its own copy of the tree, and so do the programs that its tests start."""
    copy = copies.get()
    os.chdir(copy)
    sys.path[:0] = [copy, os.path.join(copy, "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])


def run_tests(tests: list[str]) -> None:
    os.setsid()
    output = os.open(f"output.{os.getppid()}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", "not emulated", *tests]))


def pass_all(tests: list[str]) -> bool:
    """Whether tests pass, in a fork of this process; not if they exceed the time limit."""
    process = FORK.Process(target=run_tests, args=(tests,))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return process.exitcode == 0


def survives(mutant: MutationSpec, tests: list[str]) -> str | None:
    """The changed line of a mutant that survives its tests."""
    path = Path(mutant.module_path)
    old, new = apply_mutation(path, get_operator(mutant.operator_name)(), mutant.occurrence)
    try:
        return changed_line(old, new) if pass_all(tests) else None
    finally:
        path.write_text(old)


def require_passing(test: str) -> None:
    """Raises RuntimeError unless a test passes on unchanged code; leaves bytecode behind."""
    if not pass_all([test]):
        output = Path(f"output.{os.getpid()}.txt").read_text()
        raise RuntimeError(f"{test} does not pass without a mutant:\n{output}")


def workers(copies: list[Path]) -> ProcessPoolExecutor:
    queue = FORK.SimpleQueue()
    for copy in copies:
        queue.put(str(copy))
    return ProcessPoolExecutor(len(copies), FORK, enter, (queue,))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files whose path has this in it")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="how many at a time (default: %(default)s)")
    options = parser.parse_args()
    shutil.rmtree(COPIES, ignore_errors=True)
    first, *others = (COPIES / str(number) for number in range(options.workers))
    shutil.copytree(ROOT, first, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
    os.chdir(first)
    tests = {
        file: [str(next(Path().glob(f"tests/*/test_{name}.py"))) for name in names]
        for file, names in TESTS.items()
        if options.only in file
    }
    with workers([first] * options.workers) as pool:
        list(pool.map(require_passing, dict.fromkeys(itertools.chain(*tests.values()))))
    # No bytecode of the files to change may stay: Python compares only size and time in seconds.
    for file in TESTS:
        for compiled in Path(file).parent.glob(f"__pycache__/{Path(file).stem}.*"):
            compiled.unlink()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    for other in others:
        shutil.copytree(first, other)
    found: dict[str, list[str]] = {file: [] for file in tests}
    with workers([first, *others]) as pool:
        for file, lines in found.items():
            mutants = mutants_of(file)
            for number, line in enumerate(pool.map(survives, mutants, [tests[file]] * len(mutants)), 1):
                if line is not None:
                    lines.append(line)
                    print(f"survived: {line}", flush=True)
                if number % 10 == 0 or number == len(mutants):
                    print(f"{file}: {number} of {len(mutants)} mutants tried", flush=True)
    wrong = [f"unexplained: {file}: {line}" for file, lines in found.items() for line in lines if line not in EXPLAINED]
    if not options.only:
        wrong += [f"did not survive: {line}" for line in EXPLAINED if line not in itertools.chain(*found.values())]
    print("\n".join(wrong) or "tests detect all mutants but those in EXPLAINED")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
