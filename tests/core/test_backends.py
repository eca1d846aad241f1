"""Which backend serves a call, the messages about unavailable ones, and the cost of importing gradstat."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.processes import Forks

import gradstat
from gradstat._core import backends, native
from gradstat._core.measure import resolve_for

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTION_SETS = ["baseline", "avx2", "avx512"]
# Given to pytest as they are: it fails if there is no such test.
EXACT_TESTS = [
    "core/test_conformance.py::test_every_field_is_exact",
    "core/test_conformance.py::test_every_length",
    "core/test_fuzz.py::test_any_tensors",
    "core/test_multiply.py::test_products_and_their_rows_are_right",
    "lowprecision/test_quantization.py::test_every_pattern_of_bits_is_stored_as_by_ml_dtypes",
    "lowprecision/test_quantization.py::test_blocks_along_any_dimension",
]


def test_native_serves_every_device_and_unavailable_backends_say_why() -> None:
    for status in gradstat.backends():
        assert status.detail
        assert status.chosen is (status.available and status.name == "native")
        if not status.available:
            with pytest.raises(gradstat.BackendUnavailableError, match=f"backend '{status.name}' is not available"):
                backends.resolve(status.name, status.device)


def test_a_device_without_kernels_is_refused_by_the_tensors_name_or_with_the_remedy() -> None:
    with pytest.raises(gradstat.BackendUnavailableError, match=r"'native'.*no kernels for devices of type 'mps'.*'w'"):
        resolve_for("native", "mps", lambda i: "w", 0)
    with pytest.raises(gradstat.BackendUnavailableError, match=r"no backend serves.*'mps'.*copies on the CPU"):
        backends.resolve(None, "mps")


def test_kernels_that_the_gpu_or_its_driver_cannot_run_are_an_unavailable_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Library:
        @staticmethod
        def load_kernels(device: int) -> None:
            raise RuntimeError("gradstat: loading a kernel: no kernel image is available")

        @staticmethod
        def architectures() -> str:
            return "sm_90"

    native.load_cpu()  # the real one, if no test before this has
    monkeypatch.setattr(native, "_load", lambda name: Library)
    monkeypatch.setattr(native, "library_path", lambda name: ROOT)
    for name, value in (("is_available", True), ("current_device", 0), ("get_device_name", "Tesla T4")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    with pytest.raises(gradstat.BackendUnavailableError, match=r"for sm_90.*Tesla T4.*no kernel image.*Update the dr"):
        native.load_cuda.__wrapped__()


USE = "import gradstat, torch; gradstat.stats([torch.ones(1)])"
STALE = """
from gradstat import _fields; _fields.FINGERPRINT += ',kurtosis:sum'
import gradstat, torch
assert gradstat.stats([torch.ones(1)], backend='reference').shape == (1, len(_fields.FIELDS))
gradstat.stats([torch.ones(1)])
"""


FORCED: list[tuple[str, dict[str, str], str]] = [
    (USE, {"GRADSTAT_BACKEND": "fast"}, "unknown backend 'fast' in GRADSTAT_BACKEND"),
    (USE, {"GRADSTAT_BACKEND": "triton", "TRITON_INTERPRET": "0"}, "Triton compiles for GPUs only"),
    (STALE, {}, "StaleExtensionError: .*,kurtosis:sum.*Rebuild it"),
]


def test_the_environment_forces_a_backend_and_nothing_falls_back(forks: Forks) -> None:
    shown = "import gradstat; print([s.name for s in gradstat.backends() if s.chosen and s.device == 'cpu'])"
    assert forks.run(shown, GRADSTAT_BACKEND="reference").stdout == "['reference']\n"
    assert forks.run(shown, GRADSTAT_BACKEND="auto").stdout == "['native']\n"
    for code, environment, message in FORCED:
        result = forks.run(code, **environment)
        assert result.returncode != 0
        assert re.search(message, result.stderr, re.DOTALL), result.stderr


def test_without_the_compiled_extension_the_reference_serves(forks: Forks) -> None:
    code = (
        "from gradstat._core import native; native.library_path = lambda *_: None\n"
        "import gradstat, torch\n"
        "print([s.name for s in gradstat.backends() if s.chosen and s.device == 'cpu'])\n"
        "model = torch.nn.Linear(2, 2); model(torch.ones(1, 2)).sum().backward()\n"
        "print(gradstat.check(model).ok, float(gradstat.clip_grad_norm_(model.parameters(), 1.0)) > 1)\n"
        "gradstat.stats([torch.ones(1)], backend='native')"
    )
    result = forks.run(code, warnings="default")
    assert result.stdout.splitlines() == ["['reference']", "True True"]
    assert result.stderr.count("UserWarning: gradstat uses its slow reference backend for cpu tensors. native:") == 1
    assert "no C++ compiler was found at installation" in result.stderr


def test_sources_imported_instead_of_a_compiled_install_name_both_places(tmp_path: Path, forks: Forks) -> None:
    """As in a clone after `pip install .`, where Python finds the folder of the clone first."""
    clone, packages = tmp_path / "clone", tmp_path / "site-packages"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "gradstat", clone / "gradstat", ignore=ignored)
    (packages / "gradstat").mkdir(parents=True)
    library = native.library_path("_C")
    (packages / "gradstat" / library.name).symlink_to(library)
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import gradstat\n"
        "print(next(s.detail for s in gradstat.backends() if (s.name, s.device) == ('native', 'cpu')))\n"
    )
    result = forks.run(code, str(clone), str(packages), warnings="ignore")
    assert f"the sources in {clone / 'gradstat'} were imported, which are not compiled" in result.stdout, result.stderr
    assert f"instead of the compiled gradstat in {packages / 'gradstat'}." in result.stdout
    assert f"Run the program outside of {clone}, or compile the sources: `pip install" in result.stdout


@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_every_other_instruction_set_gives_exact_results(instructions: str, forks: Forks) -> None:
    chosen = next(s.detail for s in gradstat.backends() if (s.name, s.device) == ("native", "cpu"))
    best = next(name for name in INSTRUCTION_SETS if f"{name} instructions" in chosen)
    if instructions == best:
        pytest.skip("all other tests run with it")
    if INSTRUCTION_SETS.index(instructions) > INSTRUCTION_SETS.index(best):
        result = forks.run(USE, GRADSTAT_CPU_INSTRUCTIONS=instructions)
        assert "is not available on this machine; available: " in result.stderr
        return
    result = forks.run(
        "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))",
        *("-q", "-p", "no:cacheprovider", "-k", "native-cpu and not complex128"),
        *(str(ROOT / "tests" / test) for test in EXACT_TESTS),
        warnings="default",
        GRADSTAT_CPU_INSTRUCTIONS=instructions,
    )
    assert result.returncode == 0, result.stdout


def test_importing_gradstat_loads_nothing_heavy_and_what_is_imported_late_is_there(forks: Forks) -> None:
    code = """
    import sys, torch; before = set(sys.modules); import gradstat
    new = set(sys.modules) - before
    heavy = {'triton', 'lightning', 'transformers', 'accelerate', 'matplotlib', 'kernels'}
    late = [f'gradstat.{name}' for name in (*gradstat._LAZY.values(), 'distributed', 'integrations', 'kernels') if name]
    late = (*late, 'torch.distributed.')
    print(sorted({name.split('.')[0] for name in new} & heavy), sorted(n for n in new if n.startswith(late)))
    assert set(gradstat.__all__) | {'monitor', 'distributed'} == set(dir(gradstat))
    assert gradstat.monitor.Monitor is gradstat.Monitor is vars(gradstat)['Monitor']
    assert all(getattr(gradstat, name) is not None for name in gradstat._LAZY)
    gradstat.moniter
    """
    result = forks.run(code)
    assert result.stdout == "[] []\n", result.stderr
    assert "AttributeError: module 'gradstat' has no attribute 'moniter'" in result.stderr, result.stderr


def test_kernels_do_not_hide_a_package_of_that_name(tmp_path: Path) -> None:
    """Hugging Face's `kernels` stays importable, also from the repository's root."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("theirs = True\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.theirs)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "True\n", result.stderr


# From the lowest to the highest: a module imports from layers below its own only.
LAYERS = {
    "gradstat": """
        _fields _torch_version _version | kernels | _core | tensor_stats | report | check
        | clip accumulation | adaptive patch counters lowprecision | guard | _step | step amp
        | distributed recording replay | rules | monitor | automatic | __init__
        | bench integrations pytest_plugin | demo | __main__
    """,
    "gradstat._core": """
        text wrappers
        | files importing warn compiling collectives nested norms tensors engines announce
        | native reference saved hooks | backends parameters measurement
        | host_copy agreement | sharded | measure | multiply | __init__
    """,
    "gradstat.monitor": """
        unwatched options policies actions segments flight_file source ranks backward_passes
        | endings diagnosis arguments state | probes page_data | recorder view | command log clips zeroed_passes
        | reviewer
        | responder | results | monitor | listener testing | __init__
    """,
}


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_down_only(package: str) -> None:
    import ast

    level = {name: i for i, names in enumerate(LAYERS[package].split("|")) for name in names.split()}
    folder = ROOT / package.replace(".", "/")
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        own = relative.parts[0].removesuffix(".py")
        assert own in level, f"{relative} has no place in the layers"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                named = [f"{module}.{a.name}" for a in node.names] if module == package else [module]
            elif isinstance(node, ast.Import):
                named = [a.name for a in node.names]
            else:
                continue
            for name in named:
                if name != package and not name.startswith(f"{package}."):
                    continue
                other = name.removeprefix(package).split(".")[1] if name != package else "__init__"
                other = other if other in level else "__init__"
                assert other == own or level[other] < level[own], f"{relative} imports {other}, which is not below it"
