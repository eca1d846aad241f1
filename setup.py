"""Builds the compiled libraries: CPU if a C++ compiler is found, CUDA if nvcc and a GPU are found, or if asked for.

Both use torch's stable ABI, so that one binary serves every torch >= 2.10 and every Python >= 3.10. All other package
metadata is in pyproject.toml.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CUDA_ARCHITECTURES = ["75", "80", "86", "89", "90", "100", "120"]
COMMON = ["-O3", "-std=c++17", "-g0"]
CXX_FLAGS = [*COMMON, "-ffp-contract=fast", "-fvisibility=hidden", "-Wall", "-Wextra"]
# gcc 12 warns about its own AVX-512 headers, and about the ABI of vector types in functions that are always inlined.
CXX_FLAGS += ["-Wno-unknown-warning-option", "-Wno-psabi", "-Wno-maybe-uninitialized"]
# Warnings are errors for developers of gradstat, but not for users who install it with a newer compiler.
STRICT = os.environ.get("GRADSTAT_WERROR") == "1"
CXX_FLAGS += ["-Werror"] if STRICT else []
# Flags that `make sanitize` and `make coverage-cxx` add for compiler and linker. They come last and take precedence.
INSTRUMENTATION = os.environ.get("GRADSTAT_INSTRUMENTATION", "").split()
MACROS = [("TORCH_TARGET_VERSION", "0x020a000000000000"), ("Py_LIMITED_API", "0x030a0000"), ("USE_CUDA", None)]


def cxx_compiler():
    """The C++ compiler distutils would use, or None."""
    candidates = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def has_gpu():
    """Whether the machine has an NVIDIA GPU, as Linux or the Linux of Windows shows it."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or os.path.exists("/dev/dxg")


def cuda_home():
    """The CUDA toolkit to build with, or None. GRADSTAT_CUDA=0 disables it, =1 requires it, else it takes a GPU."""
    wanted = os.environ.get("GRADSTAT_CUDA", "")
    is_asked_for = wanted == "1" or bool(os.environ.get("GRADSTAT_CUDA_ARCHITECTURES"))
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if nvcc is None and os.path.exists("/usr/local/cuda/bin/nvcc"):
        nvcc = "/usr/local/cuda/bin/nvcc"
    if nvcc and os.path.exists(nvcc):
        if not is_asked_for and not has_gpu():
            print("gradstat: no GPU found, so CUDA code is not compiled; GRADSTAT_CUDA=1 compiles it.", file=sys.stderr)
            return None
        # nvcc may be a wrapper on PATH; a dry run prints the path of its toolkit.
        dry_run = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
        described = subprocess.run(dry_run, capture_output=True, text=True, check=True).stderr
        return os.path.realpath(
            next(line[7:] for line in described.splitlines() if line.startswith("#$ TOP=")).strip('" ')
        )
    if wanted == "1":
        sys.exit("GRADSTAT_CUDA=1, but no nvcc was found: put it on PATH or set CUDA_HOME.")
    return None


def cuda_architectures():
    """The architectures to compile for: those in GRADSTAT_CUDA_ARCHITECTURES, such as "80 90", or all."""
    wanted = os.environ.get("GRADSTAT_CUDA_ARCHITECTURES", "").split()
    if not all(re.fullmatch(r"\d+[af]?", architecture) for architecture in wanted):
        sys.exit(f'GRADSTAT_CUDA_ARCHITECTURES: expected numbers such as "80 90", got "{" ".join(wanted)}".')
    return wanted or CUDA_ARCHITECTURES


def architectures_text():
    """The architectures as compiled into the library, which reports them."""
    return " ".join(f"sm_{a}" for a in cuda_architectures())


def torch_extension(name, sources, **kwargs):
    """An extension against torch's headers and libraries; nothing in it depends on the torch version."""
    return Extension(
        name,
        sources,
        depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").iterdir())],
        define_macros=MACROS,
        extra_compile_args=[*CXX_FLAGS, *kwargs.pop("compile_args", []), *INSTRUMENTATION],
        library_dirs=kwargs.pop("library_dirs", []),
        extra_link_args=[*link_order(), *kwargs.pop("link_args", []), *INSTRUMENTATION],
        py_limited_api=True,
        **kwargs,
    )


def link_order():
    """The linker arguments for libraries, in symbol lookup order.

    libstdc++ comes before torch, whose libraries export some of its newer functions: symbols bound to those would be
    missing with a torch that exports others. Torch's libraries are linked with --no-as-needed, even if no symbol is
    resolved from them at build time: libtorch loads libtorch_cuda, which a CPU build of torch does not have.
    """
    torch_libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
    if sys.platform.startswith("linux"):
        return ["-lstdc++", "-Wl,--no-as-needed", *torch_libraries, "-Wl,--as-needed"]
    return [*torch_libraries, "-undefined", "dynamic_lookup"]


class BuildExtension(build_ext):
    """Compiles .cu files with nvcc, and all sources in parallel."""

    def build_extensions(self):
        # Imported here because importing torch takes seconds and is not needed to produce metadata.
        from torch.utils.cpp_extension import include_paths, library_paths

        for extension in self.extensions:
            extension.library_dirs += library_paths()
            extension.extra_compile_args += [flag for path in include_paths() for flag in ("-isystem", path)]
            # Builds are reproducible only if torch's location does not appear in them.
            extension.extra_compile_args += [f"-ffile-prefix-map={path}=torch" for path in include_paths()]
        self.compiler.src_extensions.append(".cu")
        compile_one = self.compiler._compile
        jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))

        def compile_any(obj, source, extension, cc_args, extra, pp_opts):
            print(f"compiling {source}", flush=True)
            if not source.endswith(".cu"):
                compile_one(obj, source, extension, cc_args, extra, pp_opts)
                return
            targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in cuda_architectures()]
            # PTX, for the H100's successors and for what comes after the newest.
            virtual = {a for a in cuda_architectures() if a == "90"} | {cuda_architectures()[-1]}
            targets += [f"-gencode=arch=compute_{a},code=compute_{a}" for a in sorted(virtual)]
            command = [os.path.join(cuda_home(), "bin", "nvcc"), "-O3", "-std=c++17", *targets]
            command += ["--threads", str(jobs)]
            command += ["-Werror", "all-warnings"] if STRICT else []
            command += ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-c", source, "-o", obj]
            subprocess.run(command, check=True)

        def compile_all(sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_preargs=None,
                        extra_postargs=None, depends=None):  # fmt: skip
            compiler = self.compiler
            macros, objects, extra, pp_opts, build = compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            cc_args = compiler._get_cc_args(pp_opts, debug, extra_preargs)
            with ThreadPoolExecutor(jobs) as pool:
                tasks = [pool.submit(compile_any, obj, *build[obj], cc_args, extra, pp_opts) for obj in build]
            for task in tasks:
                task.result()
            return objects

        self.compiler.compile = compile_all
        super().build_extensions()

    def build_extension(self, extension):
        library = Path(self.get_ext_fullpath(extension.name))
        if extension.name == "gradstat._C_cuda" and library.exists():
            # A library compiled for other architectures must be rebuilt, however new it is.
            self.force = self.force or f"\0{architectures_text()}\0".encode() not in library.read_bytes()
        super().build_extension(extension)


def extensions():
    if os.environ.get("GRADSTAT_COMPILE") == "0":  # to compile separately, or to use the pure-Python backends
        return []
    has_headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
    if cxx_compiler() is None or not has_headers:
        missing = "Python headers (python3-dev)" if cxx_compiler() else "C++ compiler"
        print(f"gradstat: no {missing} found; installing the pure-Python backends only.", file=sys.stderr)
        return []
    found = [torch_extension("gradstat._C", ["csrc/ops.cpp", "csrc/stats_cpu.cpp"])]
    home = cuda_home()
    if home is not None:
        names = ("ops_cuda.cpp", "launch_state.cpp", "stats_cuda.cu", "scale_cuda.cu")
        architectures = f'-DGRADSTAT_CUDA_ARCHITECTURES="{architectures_text()}"'
        cuda = torch_extension(
            "gradstat._C_cuda",
            [f"csrc/{name}" for name in names],
            compile_args=["-isystem", os.path.join(home, "include"), architectures],
            library_dirs=[os.path.join(home, "lib64"), os.path.join(home, "lib")],
            link_args=["-lcudart_static", "-ldl", "-lrt", "-lpthread"],
        )
        found.append(cuda)
    return found


def repository():
    """The address of the repository, as the runner of a workflow has it; else an empty string."""
    name = os.environ.get("GITHUB_REPOSITORY", "")
    return name and f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"


def long_description():
    """The README, whose relative links a package index cannot follow."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not repository():
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{repository()}/raw/main/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{repository()}/blob/main/", text)


def project_urls():
    places = {"Repository": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
    return {name: repository() + place for name, place in places.items()} if repository() else {}


# With --no-build-isolation pip ignores what pyproject.toml requires. An older setuptools complains about the license.
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"gradstat needs setuptools >= 77 to be built, found {setuptools.__version__}. "
        'Upgrade it: pip install -U "setuptools>=77"'
    )
setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
