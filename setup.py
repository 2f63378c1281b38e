"""Builds the extension for the torch that is installed, with CUDA where that torch and this machine have it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

VERSION = "0.1.0"

try:
    import torch
except ImportError:
    if not {"sdist", "egg_info"} & set(sys.argv):  # now, and not once pip has downloaded a torch
        sys.exit(
            "activations-cuda: torch must be installed first, and pip's build isolation hides it: install torch, then run "
            "pip install --no-build-isolation . in the source tree"
        )
    setup(version=VERSION, install_requires=["torch"])
    sys.exit()


def flag(name):
    return os.environ.get(name, "0").lower() not in ("", "0", "off", "false", "no")


def find_toolkit():
    """The CUDA toolkit's root, or None. A toolkit counts when both its compiler and its headers are there."""
    if os.environ.get("CUDA_HOME"):
        candidates = [os.environ["CUDA_HOME"]]
    else:
        candidates = ["/usr/local/cuda"]
        nvcc = shutil.which("nvcc")
        if nvcc:
            # The nvcc on PATH may be a wrapper that stands elsewhere; its dry run tells the toolkit's real place.
            run = subprocess.run([nvcc, "-dryrun", "none.cu"], capture_output=True, text=True)
            candidates = re.findall(r"^#\$ TOP=(.+)$", run.stderr, re.MULTILINE) + candidates
    for root in map(Path, candidates):
        headers = [root / "include/cuda_runtime.h", *root.glob("targets/*/include/cuda_runtime.h")]
        if (root / "bin/nvcc").exists() and any(header.exists() for header in headers):
            return root.resolve()
    return None


def check_toolkit(toolkit):
    """End where the toolkit is of another CUDA major version than torch: what it compiles would not load."""
    run = subprocess.run([toolkit / "bin/nvcc", "--version"], capture_output=True, text=True)
    found = re.search(r"release (\d+)\.(\d+)", run.stdout)
    major = torch.version.cuda.split(".")[0]
    if found and found[1] != major:
        sys.exit(
            f"activations-cuda: {toolkit} is CUDA {found[1]}.{found[2]}, but torch {torch.__version__} is built with CUDA "
            f"{torch.version.cuda}: set CUDA_HOME to a toolkit of CUDA {major}, or FORCE_CPU=1 to build without CUDA"
        )


def find_compiler():
    return shlex.split(os.environ.get("CXX") or "c++")[0]


def is_clang():
    compiler = shutil.which(find_compiler())
    return compiler is not None and "clang" in subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def check_compiler():
    compiler = find_compiler()
    if not shutil.which(compiler):
        sys.exit(f"activations-cuda: there is no C++ compiler {compiler}: install one, e.g. g++, or set CXX to it")


def why_not_cuda(toolkit):
    """The reason and its mend, or None."""
    if flag("FORCE_CPU"):
        return "FORCE_CPU is set", "unset it"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build", "install one with CUDA"
    if toolkit is None:
        where = os.environ.get("CUDA_HOME")
        reason = f"CUDA_HOME={where} holds no nvcc and headers" if where else "no nvcc and headers were found"
        return reason, f"set CUDA_HOME to a toolkit of CUDA {torch.version.cuda.split('.')[0]}"
    return None


def supported_archs(toolkit):
    """The architectures that the installed torch was built for, as TORCH_CUDA_ARCH_LIST has them, with PTX for the newest.

    Without those that are too new for the toolkit, which may be older than torch's.
    """
    run = subprocess.run([toolkit / "bin/nvcc", "--list-gpu-arch"], capture_output=True, text=True)
    known = re.findall(r"compute_(\d+)", run.stdout)
    names = [name for name in re.findall(r"sm_(\d+)", torch._C._cuda_getArchFlags()) if name in known]
    archs = sorted({(int(name[:-1]), int(name[-1])) for name in names})
    return ";".join(f"{major}.{minor}" for major, minor in archs) + "+PTX"


def commit():
    """The commit that is built, "-dirty" behind it where files differ, or None outside of a git checkout or without git."""
    root = Path(__file__).parent
    if not (root / ".git").exists() or not shutil.which("git"):
        return None
    git = ["git", "describe", "--always", "--exclude=*", "--dirty", "--abbrev=12"]
    return subprocess.run(git, cwd=root, capture_output=True, text=True).stdout.strip() or None


torch_minor = ".".join(torch.__version__.split(".")[:2])
toolkit = find_toolkit()
reason = why_not_cuda(toolkit)
if reason and flag("FORCE_CUDA"):
    sys.exit("activations-cuda: FORCE_CUDA is set, but {}: {}".format(*reason))
if reason:
    print("activations-cuda: building for the CPU only: {}".format(*reason))
else:
    check_toolkit(toolkit)
    os.environ["CUDA_HOME"] = str(toolkit)  # read when torch.utils.cpp_extension is imported
    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = supported_archs(toolkit)

from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


class BuildWithRecord(BuildExtension):
    """Leaves beside the extension what it was built for, which Python must know before it loads the extension."""

    def finalize_options(self):
        super().finalize_options()
        self.force = True  # ninja knows what is stale: what includes an edited header too
        # pip would build in a new folder each time.
        device = "cpu" if reason else "cuda"
        self.build_temp = f"build/{sys.implementation.cache_tag}-torch-{torch.__version__}-{device}"

    def run(self):
        check_compiler()
        super().run()
        record = Path(self.get_ext_fullpath("activations_cuda._build")).with_name("_build.py")
        record.write_text(
            "# Written by setup.py.\n"
            f"version = {self.distribution.get_version()!r}\n"
            f"commit = {commit()!r}\n"
            f"torch = {str(torch.__version__)!r}\n"
            f"cuda = {None if reason else torch.version.cuda!r}\n"
            f"archs = {[] if reason else os.environ['TORCH_CUDA_ARCH_LIST'].replace(' ', ';').split(';')!r}\n"
        )


# -ffp-contract=off, -fmad=false: the formulas mean what they say, alpha * x + beta has two roundings on every machine.
# -fno-trapping-math: without it the compiler vectorises no conversion from half.
# -fopenmp: at::parallel_for, a template, is serial without it. It is not given to the linker, so that the calls meet the OpenMP
# library that torch has loaded, with torch's threads, and not a second one. clang's calls are another library's, LLVM's.
cxx = ["-O3", "-g0", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-fopenmp", "-fvisibility=hidden"]
link = ["-fopenmp"] if is_clang() else []
nvcc = ["-O3", "-fmad=false", "--ptxas-options=-v,--warn-on-spills"]
sources = [*sorted(str(path) for folder in ("binding", "cpu") for path in Path("csrc", folder).glob("*.cpp"))]
version_macro = ("FASTACT_VERSION", f'"{VERSION}"')

if reason:
    extension = CppExtension(
        "activations_cuda._C",
        sources,
        define_macros=[version_macro],
        extra_compile_args={"cxx": cxx},
        extra_link_args=link,
    )
else:
    extension = CUDAExtension(
        "activations_cuda._C",
        [*sources, "csrc/cuda/kernels.cu", "csrc/cuda/lookup.cu"],
        define_macros=[version_macro, ("FASTACT_CUDA", None)],
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=link,
    )

setup(
    version=VERSION,
    install_requires=["torch" if "sdist" in sys.argv else f"torch=={torch_minor}.*"],
    ext_modules=[extension],
    cmdclass={"build_ext": BuildWithRecord},
)
