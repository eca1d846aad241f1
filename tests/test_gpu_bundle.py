"""The libraries that `make gpu-bundle` makes: put in when they belong to the sources here, refused when not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gpu_bundle
import pytest


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The sources, and a bundle that says it was compiled from them."""
    shutil.copytree(gpu_bundle.ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "gradstat").mkdir()
    for name in ("setup.py", "gradstat/_fields.py"):
        shutil.copy(gpu_bundle.ROOT / name, tmp_path / name)
    bundle = tmp_path / "gpu-bundle"
    bundle.mkdir()
    (bundle / "_C.abi3.so").write_bytes(b"\x7fELF of the CPU")
    (bundle / "_C_cuda.abi3.so").write_bytes(b"\x7fELF\0sm_80 sm_90a\0of CUDA")
    gpu_bundle.describe(bundle, gpu_bundle.hash_of_sources(tmp_path))
    return tmp_path


def libraries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.so*")}


def test_a_fresh_bundle_replaces_the_libraries(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "gradstat" / "_C.abi3.so").write_bytes(b"an older one")
    assert gpu_bundle.install(checkout)
    assert libraries(checkout / "gradstat") == libraries(checkout / "gpu-bundle")
    assert "gpu-bundle: sm_80 sm_90a, compiled with torch" in capsys.readouterr().out


def test_without_a_bundle_nothing_happens(checkout: Path) -> None:
    (checkout / "gpu-bundle" / "manifest.json").unlink()  # as when making it was interrupted
    assert not gpu_bundle.install(checkout)
    shutil.rmtree(checkout / "gpu-bundle")
    assert not gpu_bundle.install(checkout)
    assert libraries(checkout / "gradstat") == {}


@pytest.mark.parametrize("changed", ["csrc/stat.h", "csrc/stats_cuda.cu", "setup.py", "gradstat/_fields.py"])
def test_a_stale_bundle_is_refused(changed: str, checkout: Path) -> None:
    with (checkout / changed).open("a") as file:
        file.write("\n")
    with pytest.raises(RuntimeError, match=r"gpu-bundle/ is stale: expected .* got .*`make gpu-bundle`"):
        gpu_bundle.install(checkout)
    assert libraries(checkout / "gradstat") == {}


def test_a_source_that_is_gone_or_new_makes_it_stale(checkout: Path) -> None:
    (checkout / "csrc" / "stat.h").rename(checkout / "csrc" / "stat2.h")
    with pytest.raises(RuntimeError, match="is stale"):
        gpu_bundle.install(checkout)


def test_a_damaged_bundle_is_refused_whole(checkout: Path) -> None:
    (checkout / "gpu-bundle" / "_C_cuda.abi3.so").write_bytes(b"\x7fELF\0sm_80")
    with pytest.raises(RuntimeError, match=r"gpu-bundle/_C_cuda.abi3.so is missing or damaged"):
        gpu_bundle.install(checkout)
    assert libraries(checkout / "gradstat") == {}


def test_the_manifest_says_what_was_compiled_and_with_what(checkout: Path) -> None:
    made = json.loads((checkout / "gpu-bundle" / "manifest.json").read_text())
    assert set(made) == {"sources", "libraries", "architectures", "torch", "python"}
    assert set(made["libraries"]) == {"_C.abi3.so", "_C_cuda.abi3.so"}
