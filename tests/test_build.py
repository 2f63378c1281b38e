"""How the package is built, installed and loaded."""

import ctypes
import re
import shutil
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

import activations_cuda
from activations_cuda import _C, _build, _load
from trees import FROM_SOURCE, ROOT, copy, install, run


def test_build_info():
    info = activations_cuda.build_info()
    assert info["version"] == activations_cuda.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", info["version"])
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert info["compiler"].split()[0] in ("gcc", "clang")
    assert bool(info["archs"]) == (info["cuda"] is not None)


def build_for(monkeypatch, torches, cuda):
    monkeypatch.setattr(_build, "torches", {f"binding {i}": version for i, version in enumerate(torches)})
    monkeypatch.setattr(_build, "cuda", cuda)


FIVE = [f"2.{minor}.0" for minor in range(11, 16)]


@pytest.mark.parametrize(
    "torches, cuda, running",
    [
        (["2.11.0"], None, ("2.13.0+cpu", None)),
        (["2.11.0"], "13.0", ("2.11.0+cu126", "12.6")),
        (["2.16.0.dev20261101+cpu"], None, ("2.16.0.dev20261102+cpu", None)),
        (["2.16.0a0+git1234567"], None, ("2.16.0a0+git7654321", None)),
        (["2.16.0rc1"], None, ("2.16.0", None)),
        (FIVE, "13.0", ("2.10.0+cpu", None)),
        (FIVE, "13.0", ("2.16.0+cu132", "13.2")),
        (FIVE, "13.0", ("2.13.0+cu126", "12.6")),
        (FIVE, "13.0", ("2.15.0.dev20261101+cu132", "13.2")),
        (FIVE, "13.0", ("2.13.0+rocm7.1", None, "7.1")),
    ],
)
def test_another_torch_is_refused(monkeypatch, torches, cuda, running):
    build_for(monkeypatch, torches, cuda)
    with pytest.raises(ImportError) as raised:
        _load.find_binding(*running)
    message = str(raised.value)
    expected, _, got = message.partition("but")
    assert f"torch {', '.join(torches)}" in expected
    assert (f" and CUDA {cuda}" in expected) == (cuda is not None)
    gpus = f"with CUDA {running[1]} " if running[1] else f"with ROCm {running[2]} " if running[2:] else ""
    assert f"torch {running[0]} {gpus}is installed" in got
    assert "pip install --no-build-isolation" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "torches, cuda, running, index",
    [
        (["2.11.0"], None, ("2.11.1+cu130", "13.0"), 0),
        (["2.11.0"], None, ("2.11.1+cu126", "12.6"), 0),
        (["2.11.0"], "13.0", ("2.11.2", "13.1"), 0),
        (["2.11.0"], None, ("2.11.0+rocm7.1", None, "7.1"), 0),
        (["2.11.0"], "13.0", ("2.11.0+cpu", None), 0),
        (["2.11.0+cpu"], None, ("2.11.0.post1", None), 0),
        (["2.16.0a0+git1234567"], None, ("2.16.0a0+git1234567", None), 0),
        (FIVE, "13.0", ("2.11.0+cu130", "13.0"), 0),
        (FIVE, "13.0", ("2.13.0+cpu", None), 2),
        (FIVE, "13.0", ("2.15.1+cu132", "13.2"), 4),
    ],
)
def test_the_binding_for_a_torch(monkeypatch, torches, cuda, running, index):
    build_for(monkeypatch, torches, cuda)
    assert _load.find_binding(*running) == f"binding {index}"


@pytest.mark.parametrize(
    "built, running, gpus, warns",
    [(None, "13.0", 1, True), (None, "13.0", 0, False), (None, None, 1, False), ("13.0", "13.0", 1, False)],
)
def test_a_cpu_build_beside_a_gpu_warns(monkeypatch, recwarn, built, running, gpus, warns):
    monkeypatch.setattr(_build, "cuda", built)
    monkeypatch.setattr(torch.version, "cuda", running)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    _load.check_gpus()
    assert [str(warning.message).count("built without CUDA") for warning in recwarn] == [1] * warns
    assert all("FORCE_CUDA=1 pip install" in str(warning.message) for warning in recwarn)


def test_import_under_another_torch():
    result = run(sys.executable, "-c", "import torch; torch.__version__ = '1.13.1'; import activations_cuda", cwd=Path.home())
    assert result.returncode != 0
    assert "ImportError: activations_cuda" in result.stderr
    assert f"torch {', '.join(_build.torches.values())}" in result.stderr
    assert "torch 1.13.1" in result.stderr


def test_what_an_older_build_left_is_not_found(tmp_path):
    package = shutil.copytree(Path(activations_cuda.__file__).parent, tmp_path / "activations_cuda")
    (package / "_C.py").write_text("raise ImportError('an older build')")
    result = run(sys.executable, "-c", "import activations_cuda; print(activations_cuda.__file__)", cwd=tmp_path)
    assert result.stdout.strip() == str(package / "__init__.py"), result.stderr


def test_a_binding_loads_the_kernels_that_it_has():
    mapped = set(re.findall(r"libfastact_\w+", Path("/proc/self/maps").read_text()))
    assert mapped == {"libfastact_cpu"} | ({"libfastact_cuda"} if _build.cuda and torch.version.cuda else set())


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_the_binding_needs_no_library_of_cudas():
    """So it serves builds of torch without CUDA."""
    needed = run("readelf", "--dynamic", _C.__file__).stdout
    assert "libtorch_cpu" in needed and not re.search("cudart|torch_cuda|c10_cuda|fastact_cuda", needed)


@pytest.mark.skipif(_build.cuda is None, reason="needs a CUDA build")
def test_the_binding_finds_the_kernels_for_cuda():
    """All that it refers to, where torch has CUDA, and nothing elsewhere."""
    names = run("nm", "--dynamic", "--undefined-only", _C.__file__).stdout.split()
    names = [name for name in names if "fastact4cuda" in name]
    library = ctypes.CDLL(str(Path(_load.__file__).with_name("libfastact_cuda.so"))) if torch.version.cuda else None
    assert len(names) >= 10
    assert all(hasattr(library, name) for name in names) or library is None
    assert all(hasattr(ctypes.CDLL(None), name) for name in names) == (library is not None)


def setup(command="--name", torch_is="torch.version.cuda = torch.version.cuda or '13.0'", **environment):
    """setup.py under a torch that is doctored, by default into a CUDA build. Prints the architectures."""
    program = (
        f"import os, runpy, sys\nimport torch\n{torch_is}\nrunpy.run_path('setup.py')\n"
        "print(os.environ.get('TORCH_CUDA_ARCH_LIST'))"
    )
    return run(sys.executable, "-c", program, "--quiet", command, **environment)


def assert_ends(result, *parts):
    """It failed, and its last word is a line that has all of these."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    message = result.stderr.splitlines()[-1]
    for part in ("activations-cuda: ", *parts):
        assert part in message


@FROM_SOURCE
def test_force_cuda_makes_what_is_missing_an_error():
    assert_ends(setup(FORCE_CUDA="1", FORCE_CPU="1"), "FORCE_CUDA is set, but FORCE_CPU is set: unset it")
    without = setup(FORCE_CUDA="1", torch_is="torch.version.cuda = None")
    assert_ends(without, f"FORCE_CUDA is set, but torch {torch.__version__} is a CPU build: install one with CUDA")
    nowhere = setup(FORCE_CUDA="1", CUDA_HOME="/nonexistent")
    assert_ends(
        nowhere, "FORCE_CUDA is set, but CUDA_HOME=/nonexistent holds no nvcc and headers: set CUDA_HOME to a toolkit of"
    )


@FROM_SOURCE
def test_an_older_torch():
    result = setup(torch_is="torch.__version__ = '2.10.1+cu128'")
    assert_ends(result, "or newer, got 2.10.1+cu128")
    oldest = re.search(r"torch [\d.]+ or newer", result.stderr)[0]
    assert all(oldest in (ROOT / page).read_text() for page in ("README.md", "docs/install.md"))


@FROM_SOURCE
def test_torch_folders_that_hold_none(tmp_path):
    result = setup(CUDA_HOME=toolkit(tmp_path, "13.0"), TORCH_FOLDERS=str(tmp_path))
    assert_ends(result, f"TORCH_FOLDERS: expected folders of torch, got {tmp_path}")


@FROM_SOURCE
def test_no_torch_at_all():
    """As within pip's build isolation."""
    for command in "dist_info", "bdist_wheel":
        result = setup(command, torch_is="sys.modules['torch'] = None")
        assert_ends(result, "install torch", "pip install --no-build-isolation .")


@FROM_SOURCE
@pytest.mark.parametrize("compiler, path", [("c++", "/nonexistent"), ("/nonexistent/g++", None)])
def test_no_compiler(compiler, path):
    environment = {"PATH": path, "CXX": ""} if path else {"CXX": compiler}
    result = setup("build_ext", FORCE_CPU="1", **environment)
    assert_ends(result, f"no C++ compiler {compiler}", "install one", "CXX")


@FROM_SOURCE
@pytest.mark.skipif(not shutil.which("clang++"), reason="needs clang")
def test_a_build_by_clang(tmp_path):
    """Whose calls of OpenMP are not those of the library that torch has loaded."""
    copy(tmp_path / "tree")
    install(tmp_path / "tree", tmp_path / "site", FORCE_CPU="1", CC="clang", CXX="clang++")
    program = """
        import activations_cuda, torch
        assert activations_cuda.build_info()["compiler"].startswith("clang ")
        x = torch.randn(1_000_003, requires_grad=True)
        y = activations_cuda.hardtanh(x)
        y.sum().backward()
        assert torch.equal(y, torch.nn.functional.hardtanh(x))
        assert torch.equal(x.grad, (x.abs() < 1).float())
    """
    result = run(sys.executable, "-c", textwrap.dedent(program), cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert result.returncode == 0, result.stderr


def toolkit(folder, release, *archs):
    """What setup.py asks of a CUDA toolkit."""
    nvcc = folder / "bin/nvcc"
    answers = f"case $1 in\n--version) echo release {release};;\n--list-gpu-arch) echo {' '.join(archs)};;\nesac"
    for path, text in [(nvcc, answers), (folder / "include/cuda_runtime.h", "")]:
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{text}\n")
    nvcc.chmod(0o755)
    return str(folder)


@FROM_SOURCE
@pytest.mark.parametrize("force", ["0", "1"])
def test_a_toolkit_of_another_major_version(force, tmp_path):
    result = setup(CUDA_HOME=toolkit(tmp_path, "9.2"), FORCE_CUDA=force)
    assert_ends(result, f"{tmp_path} is CUDA 9.2, but torch {torch.__version__} is built with CUDA", "CUDA_HOME", "FORCE_CPU=1")


@FROM_SOURCE
@pytest.mark.skipif(_build.cuda is None, reason="needs a CUDA build")
def test_architectures():
    unset = setup(TORCH_CUDA_ARCH_LIST="").stdout.split()[-1]
    flags = torch._C._cuda_getArchFlags().split()
    assert unset.endswith("+PTX")
    assert {f"sm_{arch.replace('.', '')}" for arch in unset.removesuffix("+PTX").split(";")} == {
        f for f in flags if f[:3] == "sm_"
    }
    assert setup(TORCH_CUDA_ARCH_LIST="9.0").stdout.split()[-1] == "9.0"


@FROM_SOURCE
@pytest.mark.skipif(_build.cuda is None, reason="needs a CUDA build")
def test_a_toolkit_older_than_torchs(tmp_path):
    """Is asked for no architecture that it doesn't know."""
    older = toolkit(tmp_path, torch.version.cuda, "compute_75", "compute_80", "compute_86")
    torchs = "torch._C._cuda_getArchFlags = lambda: 'sm_75 sm_80 sm_120 compute_120'"
    assert setup(torch_is=torchs, TORCH_CUDA_ARCH_LIST="", CUDA_HOME=older).stdout.split()[-1] == "7.5;8.0+PTX"


@FROM_SOURCE
@pytest.mark.cuda
@pytest.mark.skipif(CUDA_HOME is None, reason="needs a CUDA toolkit")
def test_a_build_for_another_gpu(tmp_path):
    """Without PTX a cubin serves its own major version alone."""
    major, minor = torch.cuda.get_device_capability()
    other = "8.0" if major != 8 else "9.0"
    copy(tmp_path / "tree")
    install(tmp_path / "tree", tmp_path / "site", TORCH_CUDA_ARCH_LIST=other, FORCE_CUDA="1")
    program = "import activations_cuda as a, torch; a.hardtanh(torch.ones(9, device='cuda'))"
    result = run(sys.executable, "-c", program, cwd=tmp_path / "site")
    assert result.returncode != 0
    assert f"expected code for this GPU, of compute capability {major}.{minor}" in result.stderr
    assert f"build it again with TORCH_CUDA_ARCH_LIST={major}.{minor}" in result.stderr


PROGRAM = """
import torch, activations_cuda
from torch import nn
net = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU6(), nn.Dropout(), nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(),
    nn.Conv2d(16, 16, 3)).cuda()
x = torch.randn(8, 3, 64, 64, device="cuda")

def gradients(dtype, scope):
    torch.manual_seed(0)
    with torch.autocast("cuda", dtype), scope():
        loss = net(x).square().mean()
    return torch.autograd.grad(loss, net.parameters())

torch.use_deterministic_algorithms(True)
for dtype in torch.bfloat16, torch.float32:
    expected = gradients(dtype, torch.enable_grad)
    assert all(map(torch.equal, gradients(dtype, lambda: activations_cuda.recompute(check=True)), expected))
    assert all(map(torch.equal, gradients(dtype, activations_cuda.ConvertMode), expected))
    activations_cuda.convert(net, x, recompute=True)
    assert all(map(torch.equal, gradients(dtype, torch.enable_grad), expected))
    activations_cuda.revert(net)
"""


@FROM_SOURCE
@pytest.mark.cuda
def test_a_build_for_the_cpu_on_a_gpu(tmp_path):
    """Computes there by PyTorch's ops."""
    copy(tmp_path / "tree")
    install(tmp_path / "tree", tmp_path / "site", FORCE_CPU="1")
    result = run(sys.executable, "-c", PROGRAM, cwd=tmp_path / "site", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert result.returncode == 0, result.stderr


@FROM_SOURCE
def test_force_cpu_says_so_in_one_line():
    result = setup(FORCE_CPU="1")
    assert result.returncode == 0
    assert "activations-cuda: building for the CPU only: FORCE_CPU is set\n" in result.stdout


@FROM_SOURCE
def test_an_sdist_is_made_without_torch_and_found_by_name(tmp_path):
    """And `make sanitize` builds from one."""
    copy(tmp_path / "tree")
    program = (
        "import sys; sys.modules['torch'] = None\n"
        f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    )
    result = run(sys.executable, "-c", program, cwd=tmp_path / "tree", FORCE_CPU="1")
    assert result.returncode == 0, result.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert sdist.name == f"activations_cuda-{activations_cuda.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"csrc/family.def", "csrc/bits/cuda/kernels.cu", "tests/family.py", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert {f"activations_cuda/{name}" for name in ("py.typed", "_C.pyi", "_build.pyi")} <= names

    options = ("--no-build-isolation", "--no-deps", "--no-index", "--find-links", str(tmp_path))
    dry = ("--dry-run", "--ignore-installed")
    result = run(sys.executable, "-m", "pip", "install", *dry, *options, "activations-cuda", FORCE_CPU="1")
    assert f"Would install activations-cuda-{activations_cuda.__version__}" in result.stdout, result.stderr
