"""Mutation testing: cosmic-ray changes the code in one place at a time, and the tests have to fail (`make mutate`).

For each comparison, arithmetic operator and number a single change is tried, to the next one. A mutant that survives
all tests must be listed in `EXPLAINED`; any other survivor is an error, and so is an explanation of a mutant that died.
``--only clip`` tries the files with "clip" in their path.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from cosmic_ray.commands import execute, init
from cosmic_ray.config import ConfigDict
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkResult

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutation"
# The tests that have to detect a change in a file, those that detect most first.
TESTS = {
    "gradstat/_fields.py": ("fields", "report", "update", "distributed"),
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
    "is_own=partsisNoneandnotspread.has_partial": "both lists are of the same memory; one is only quicker to make",
    "aligned=flatifflat.storage_offset()+flat.element_size()%word.itemsize==0elseflat.clone()": _COPIES,
    "aligned=flatifflat.storage_offset()*flat.element_size()+word.itemsize==0elseflat.clone()": _COPIES,
    "word=torch.int32ifsize%4==0elsetorch.int16ifsize+2==0elsetorch.int8": "shorter words only take longer",
    '_ROWS_AT_ONCE={"cpu":17}': _PACES,
    "_ROWS_AT_ONCE_ELSEWHERE=1025": _PACES,
    "@functools.lru_cache(maxsize=17)": "seventeen devices in one process; weights are made again, and are the same",
    "(first,most),*others=Counter(value_of.values()).most_common()or[(None,1)]": "nothing differs from nothing",
    "@final": "for type checkers only",
    "first=torch.full((len(self._names)+2,),_NEVER,dtype=torch.int64,device=device)": "one more that was never bad",
    'counts=torch.zeros(1,len(_COUNTS),dtype=torch.float64,device="cpu")': "an error before anybody looks at them",
    "@never_traced": "traced, it gives the same rows, and breaks the graph more often",
}


def changed_line(diff: str) -> str:
    """The first line that a mutant changes, as changed, or the line it deletes, without spaces."""
    lines = re.findall(r"^([-+])(?!\+\+|--)(.*)", diff, re.MULTILINE)
    gone = ["".join(text.split()) for sign, text in lines if sign == "-"]
    new = ["".join(text.split()) for sign, text in lines if sign == "+"]
    return next((line for line in new if line not in gone), gone[0])


def is_tried(mutation: MutationSpec, lines: list[str]) -> bool:
    is_next = mutation.operator_name != "core/NumberReplacer" or mutation.occurrence % 2 == 0
    is_read = not WITHOUT_EFFECT.search(lines[mutation.start_pos[0] - 1])
    return is_next and is_read and bool(OPERATORS.match(mutation.operator_name))


def survivors(file: str) -> list[str]:
    """The changed lines of mutants that survive the tests of a file."""
    tests = [str(next(COPY.glob(f"tests/*/test_{name}.py")).relative_to(COPY)) for name in TESTS[file]]
    command = " ".join([sys.executable, "-m pytest -x -q -p no:cacheprovider", *tests])
    lines = Path(file).read_text().splitlines()
    subprocess.run(command, shell=True, cwd=COPY, check=True)  # without any mutant
    with use_db("mutants.sqlite", WorkDB.Mode.create) as work:
        init([Path(file)], work, {})
        for item in work.pending_work_items:
            if not is_tried(item.mutations[0], lines):
                work.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED))
        print(f"{file}: {len(list(work.pending_work_items))} mutants", flush=True)
        execute(work, ConfigDict({"test-command": command, "timeout": SECONDS, "distributor": {"name": "local"}}))
        results = [result for _, result in work.completed_work_items]
        return [changed_line(result.diff) for result in results if result.test_outcome == TestOutcome.SURVIVED]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files whose path has this in it")
    options = parser.parse_args()
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT, COPY, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
    os.chdir(COPY)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(COPY), str(COPY / "tests")])
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    found = {file: survivors(file) for file in TESTS if options.only in file}
    wrong = [f"survived: {file}: {line}" for file, lines in found.items() for line in lines if line not in EXPLAINED]
    if not options.only:
        wrong += [f"no such survivor: {line}" for line in EXPLAINED if line not in itertools.chain(*found.values())]
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
