"""Tries a wheel, as a user would install it, with the Pythons and torches that this machine can get.

``make matrix`` runs the sessions tagged "usual". ``nox -f tools/noxfile.py -l`` lists all, and
``nox -f tools/noxfile.py -s "wheel(python='3.12', torch='2.12.1')" -- dist/*.whl`` runs one. They take network,
gigabytes and an hour. The outcomes belong into docs/project.md.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")  # the last patch of each release
OLDEST, NEWEST, USUAL = TORCHES[0], TORCHES[-1], "3.11"
CORNERS = (("3.10", OLDEST), (USUAL, OLDEST), (USUAL, NEWEST), ("3.14", NEWEST))  # also run the main tests
# Tests that need nothing but the installed package and pytest.
MAIN_TESTS = (
    "clip", "core/test_accumulation.py", "core/test_check.py", "core/test_compiling.py", "core/test_conformance.py",
    "core/test_host_path.py", "core/test_multiply.py", "core/test_ops.py", "core/test_report.py",
    "core/test_triton.py", "monitor/test_monitor.py", "step/test_amp.py", "step/test_step.py",
)  # fmt: skip
# Neither a compiler nor the checkout.
ALONE = {"PATH": "", "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
ARCHITECTURES = """
import torch, gradstat._core.native as native
if torch.version.cuda and native.library_path('_C_cuda'):
    native.load_cpu(); import gradstat._C_cuda as library; print(library.architectures())
"""

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = False


def built(session: nox.Session) -> Path:
    if not session.posargs:
        session.error(
            "expected a wheel after --, as in `nox -f tools/noxfile.py -- dist/*.whl`; `make wheel` builds one"
        )
    return Path(session.posargs[0]).resolve()


def first_use(session: nox.Session) -> None:
    """Uses gradstat for the first time, in an empty folder, with warnings as errors."""
    session.chdir(session.create_tmp())
    python = str(Path(session.bin) / "python")
    for arguments in (
        ["-W", "error", str(ROOT / "tools" / "first_use.py")],
        ["-m", "gradstat", "info"],
        ["-c", ARCHITECTURES],
    ):
        session.run(python, *arguments, env=ALONE, external=True)


@nox.session
@nox.parametrize(
    "python,torch",
    [
        nox.param(python, torch, tags=["usual"] * (python == USUAL or torch in (OLDEST, NEWEST)))
        for torch in TORCHES
        for python in PYTHONS
    ],
)
def wheel(session: nox.Session, torch: str) -> None:
    """The wheel with a Python and a torch; in some also the main tests."""
    tests = (session.python, torch) in CORNERS
    # The main tests use features in which the interpreter of torch 2.10's Triton is incompatible with numpy 2.
    session.install(built(session), f"torch=={torch}", "numpy<2" if tests and torch == OLDEST else "numpy")
    first_use(session)
    if not tests:
        return
    session.install("pytest>=8", "hypothesis>=6.100")
    copy = Path(session.create_tmp()) / "checkout"  # without the package, which must come from the wheel
    shutil.copytree(ROOT / "tests", copy / "tests", dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "benchmarks").mkdir(exist_ok=True)
    session.chdir(copy)
    files = [str(copy / "tests" / name) for name in MAIN_TESTS]
    session.run("pytest", "-q", "-p", "no:cacheprovider", *files, env={"PYTHONPATH": ""})


@nox.session(python=USUAL, tags=["usual"])
@nox.parametrize("torch", TORCHES)
def source(session: nox.Session, torch: str) -> None:
    """The source distribution beside the wheel, compiled with a torch's headers, for one CUDA architecture."""
    session.install(f"torch=={torch}", "numpy", "setuptools>=77")
    sdist = next(built(session).parent.glob("gradstat-*.tar.gz"))
    cuda = {"GRADSTAT_CUDA": "1", "GRADSTAT_CUDA_ARCHITECTURES": "90"}
    session.install("--no-build-isolation", "--no-cache", sdist, env=cuda)
    first_use(session)


@nox.session(python=USUAL, tags=["usual"])
@nox.parametrize("case", ["no Triton", "numpy 1", "a torch that is too old"])
def special(session: nox.Session, case: str) -> None:
    """Environments that lack something."""
    if case == "a torch that is too old":
        session.install("torch==2.9.1", "numpy<2")
        session.install("--no-deps", built(session))
        session.run("python", "-c", "import gradstat", env={"PYTHONPATH": ""}, success_codes=[1])
        return
    session.install(built(session), f"torch=={NEWEST}", "numpy<2" if case == "numpy 1" else "numpy")
    if case == "no Triton":
        session.run("uv", "pip", "uninstall", "triton", external=True)
    first_use(session)
