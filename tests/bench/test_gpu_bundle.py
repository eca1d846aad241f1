"""The libraries that `make gpu-bundle` makes: installed if compiled from these sources, refused otherwise."""

import json
import shutil
from pathlib import Path

import gpu_bundle
import pytest
import torch

SOURCES = ("setup.py", "gradstat/_fields.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The sources, and a bundle that says it was compiled from them."""
    shutil.copytree(gpu_bundle.ROOT / "csrc", tmp_path / "csrc")
    for folder in ("gradstat", "gpu-bundle"):
        (tmp_path / folder).mkdir()
    for name in SOURCES:
        shutil.copy(gpu_bundle.ROOT / name, tmp_path / name)
    bundle = tmp_path / "gpu-bundle"
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
    made = json.loads((checkout / "gpu-bundle" / "manifest.json").read_text())
    assert set(made) == {"sources", "libraries", "architectures", "torch", "python"}
    assert set(made["libraries"]) == {"_C.abi3.so", "_C_cuda.abi3.so"}


@pytest.mark.parametrize("changed", ["csrc/stat.h", "csrc/stats_cuda.cu", *SOURCES])
def test_a_stale_bundle_is_refused(changed: str, checkout: Path) -> None:
    if changed == "csrc/stat.h":
        (checkout / changed).rename(checkout / "csrc" / "stat2.h")
    else:
        with (checkout / changed).open("a") as file:
            file.write("\n")
    with pytest.raises(RuntimeError, match=r"gpu-bundle/ is stale: it was compiled from other .*`make gpu-bundle`"):
        gpu_bundle.install(checkout)
    assert libraries(checkout / "gradstat") == {}


@pytest.mark.parametrize(("capability", "runs"), [((8, 6), True), ((9, 0), True), ((7, 5), False), ((10, 3), False)])
def test_a_bundle_for_other_gpus_is_refused(
    capability: tuple[int, int], runs: bool, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if runs:
        assert gpu_bundle.install(checkout)
        return
    name = "{}{}".format(*capability)
    sentence = rf"expected code for sm_{name}.*, got sm_80 sm_90a\. .*`make gpu-bundle ARCHITECTURES={name}`"
    with pytest.raises(RuntimeError, match=sentence):
        gpu_bundle.install(checkout)
    assert libraries(checkout / "gradstat") == {}
