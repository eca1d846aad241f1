"""Mutation testing: changes the code in one place at a time and sees whether the tests notice (`make mutate`).

Mutants are made by cosmic-ray. Each runs in a copy of the checkout, in a process forked after torch was imported,
against the tests of its file until the first failure. A mutant that all tests let live must stand in
`mutants_explained.py`, with the reason why no test can kill it; any other survivor is an error, and so is an
explanation of a mutant that died.

``python tools/mutation.py`` tries one mutant of a kind at each place, ``--every`` all of them, ``--only clip`` those of
files with "clip" in their path.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from mutants_explained import EXPLAINED

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "gradstat", "kernels", "benchmarks", "csrc", "tests", "tools", "examples", "docs", "pyproject.toml", "setup.py",
)  # fmt: skip
# The tests that have to notice a change in a file, those that notice most first.
TESTS = {
    "gradstat/_fields.py": ("fields", "report"),
    "gradstat/clip.py": ("clip", "every_clip", "total_norm", "host_path", "ops", "compiling", "distributed"),
    "gradstat/distributed/_checksum.py": ("replicas",),
    "gradstat/distributed/batches.py": ("replicas",),
    "gradstat/distributed/origin.py": ("origin",),
    "gradstat/distributed/replicas.py": ("replicas",),
}
NEGATING = ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is", "Delete_Not")
NEAREST = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", *NEGATING)
SECONDS = 400.0  # a mutant that takes longer has been noticed: it hangs


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file, whose whole changed text is ``code``.

    ``before`` is the line where it changes, ``after`` the first line that is another then, both stripped.
    """

    file: str
    line: int
    before: str
    after: str
    code: str


def mutants_of(file: str, every: bool) -> Iterator[Mutant]:
    """The mutants of ``file`` that a test could notice; one of a kind at each place unless ``every``."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    source = (ROOT / file).read_text()
    ignored = _lines_without_effect(source)
    tree = get_ast(source)
    seen: set[tuple[str, object]] = set()
    negated: set[int] = set()  # lines whose condition has been turned round already
    # Of a comparison's mutants the one next to it is the hardest to notice.
    names = sorted(plugins.operator_names(), key=lambda name: not name.endswith(NEAREST))
    for name in names:
        operator_class = plugins.get_operator(name)
        if operator_class.arguments():
            continue
        operator = operator_class()
        places = [place for node in ast_nodes(tree) for place in operator.mutation_positions(node)]
        family = name.split("/")[1].rsplit("_", 1)[0]
        for occurrence, place in enumerate(places):
            (line, _), _ = place
            repeats = (family, place) in seen or (family == "AddNot" and line in negated)
            if line in ignored or (repeats and not every):
                continue
            code = mutate_code(source, operator, occurrence)
            if code is None or _changes_nothing(source, code):
                continue
            seen.add((family, place))
            if name.endswith(NEGATING):
                negated.add(line)
            before = source.splitlines()[line - 1].strip()
            yield Mutant(file, line, before, _first_difference(source, code), code)


def _changes_nothing(source: str, code: str) -> bool:
    """Whether ``code`` is no Python, or differs in annotations, which nothing evaluates here, and ``strict`` of a zip.

    That only guards against what the code around it excludes: lists of different lengths.
    """
    try:
        changed = ast.parse(code)
    except SyntaxError:
        return True
    return ast.dump(_Essential().visit(ast.parse(source))) == ast.dump(_Essential().visit(changed))


class _Essential(ast.NodeTransformer):
    def visit_keyword(self, node: ast.keyword) -> ast.keyword | None:
        self.generic_visit(node)
        return None if node.arg == "strict" else node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = ast.Constant(None)
        self.generic_visit(node)
        return node


def _lines_without_effect(source: str) -> set[int]:
    """Lines of aliases of types and of what only type checkers read."""
    found: set[int] = set()
    for node in ast.parse(source).body:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        is_alias = isinstance(node, ast.Assign) and bool({"Callable", "TypeVar", "Union", "Iterable"} & names)
        if is_alias or (isinstance(node, ast.If) and "TYPE_CHECKING" in names):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _first_difference(source: str, code: str) -> str:
    """The first line of ``code``, stripped, that is not the same in ``source`` but for its spaces."""
    pairs = zip(source.splitlines(), code.splitlines(), strict=False)
    return next((after.strip() for before, after in pairs if before.split() != after.split()), "")


def _paths(tests: tuple[str, ...]) -> list[str]:
    return [str(next(ROOT.glob(f"tests/*/test_{name}.py")).relative_to(ROOT)) for name in tests]


class Workplace:
    """A copy of the checkout in which one mutant after the other is tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)

    def try_out(self, mutant: Mutant | None, tests: tuple[str, ...]) -> str:
        """Runs ``tests`` with ``mutant``, or with the code as it is: ``killed``, ``hung`` or ``survived``."""
        target = None if mutant is None else self.folder / mutant.file
        original = target.read_text() if target else ""
        if target and mutant:
            target.write_text(mutant.code)
        try:
            return self._run(tests)
        finally:
            if target:
                target.write_text(original)

    def _run(self, tests: tuple[str, ...]) -> str:
        child = multiprocessing.get_context("fork").Process(target=self._be_the_child, args=(tests,))
        child.start()
        child.join(SECONDS)
        is_hung = child.is_alive()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
        return "hung" if is_hung else "survived" if child.exitcode == 0 else "killed"

    def _be_the_child(self, tests: tuple[str, ...]) -> None:
        os.setsid()  # with all processes it starts, it ends as a group
        os.chdir(self.folder)
        log = os.open("mutant.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (self.folder, self.folder / "tests")))
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        sys.path[:] = [str(self.folder), *(p for p in sys.path if not p.startswith(str(ROOT)))]
        import pytest

        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *_paths(tests)])
        sys.stdout.flush()
        os._exit(int(code))  # and waits for nothing that tests have left running


def judge(outcomes: dict[Mutant, str], complete: bool) -> list[str]:
    """What is wrong: survivors nobody explained and, if ``complete``, explanations without a survivor."""
    survivors = {(m.file, m.before, m.after) for m, outcome in outcomes.items() if outcome == "survived"}
    files = {m.file for m in outcomes}
    tried = {(m.file, m.before, m.after) for m in outcomes}
    wrong = [
        f"survived: {file}: {before}\n       as: {after}" for file, before, after in sorted(survivors - set(EXPLAINED))
    ]
    for key in EXPLAINED:
        if key[0] in files and (key in tried or complete) and key not in survivors:
            wrong.append(f"explained, but there is no such survivor: {key[0]}: {key[1]}\n  as: {key[2]}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files whose path has this in it")
    parser.add_argument("--every", action="store_true", help="all mutants of a place, not one of a kind")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    options = parser.parse_args()
    files = [file for file in TESTS if options.only in file]
    work = [mutant for file in files for mutant in mutants_of(file, options.every)]
    if options.list:
        for mutant in work:
            print(f"{mutant.file}:{mutant.line}: {mutant.before}\n    {mutant.after}")
        print(f"{len(work)} mutants")
        return 0
    # What every mutant needs is imported once; a fork has it at once.
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    workplaces: Queue[Workplace] = Queue()
    for number in range(options.jobs):
        workplaces.put(Workplace(ROOT / "build" / "mutation" / str(number)))
    for tests in dict.fromkeys(TESTS[mutant.file] for mutant in work):
        workplace = workplaces.get()
        if workplace.try_out(None, tests) != "survived":
            print((workplace.folder / "mutant.log").read_text()[-3000:])
            sys.exit(f"tests fail without any mutant: {', '.join(tests)}")
        workplaces.put(workplace)

    def run(mutant: Mutant) -> str:
        workplace = workplaces.get()
        try:
            return workplace.try_out(mutant, TESTS[mutant.file])
        finally:
            workplaces.put(workplace)

    outcomes: dict[Mutant, str] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, outcome in zip(work, pool.map(run, work), strict=True):
            outcomes[mutant] = outcome
            print(f"{len(outcomes)} of {len(work)}: {outcome}, {mutant.file}: {mutant.after}", flush=True)
    for file in files:
        counts = Counter(outcome for mutant, outcome in outcomes.items() if mutant.file == file)
        said = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        print(f"{file}: {counts.total()} mutants: {said}")
    wrong = judge(outcomes, options.every)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
