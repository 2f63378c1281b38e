"""Builds the kernels, a library for each device, and a binding of them to torch.

There are kernels for CUDA where the installed torch and this machine have it. The binding is for the installed torch, with or
without CUDA. TORCH_FOLDERS may name other torches, separated by colons: then there is a binding for each of them.
"""

import copy
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from glob import glob
from itertools import groupby, starmap
from pathlib import Path

from setuptools import Extension, setup

VERSION = "0.2.0"
OLDEST = 2, 11  # whose saved tensors have `data`, what a hook has packed
TORCH = "torch>={}.{}".format(*OLDEST)

try:
    import torch
except ImportError:
    if not {"sdist", "egg_info"} & set(sys.argv):  # now, and not once pip has downloaded a torch
        sys.exit(
            "activations-cuda: torch must be installed first, and pip's build isolation hides it: install torch, then run "
            "pip install --no-build-isolation . in the source tree"
        )
    setup(version=VERSION, install_requires=[TORCH, "tabulate"])
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
            # The nvcc on PATH may be a wrapper that stands elsewhere; its dry run prints the toolkit's real place.
            run = subprocess.run([nvcc, "-dryrun", "none.cu"], capture_output=True, text=True)
            candidates = re.findall(r"^#\$ TOP=(.+)$", run.stderr, re.MULTILINE) + candidates
    for root in map(Path, candidates):
        headers = [root / "include/cuda_runtime.h", *root.glob("targets/*/include/cuda_runtime.h")]
        if (root / "bin/nvcc").exists() and any(header.exists() for header in headers):
            return root.resolve()
    return None


def release_of(toolkit):
    """The toolkit's version, e.g. 13.0. Ends where torch is of another major version, whose driver may be older."""
    run = subprocess.run([toolkit / "bin/nvcc", "--version"], capture_output=True, text=True)
    release = re.search(r"release ([\d.]+)", run.stdout)[1]
    major = torch.version.cuda.split(".")[0]
    if release.split(".")[0] != major:
        sys.exit(
            f"activations-cuda: {toolkit} is CUDA {release}, but torch {torch.__version__} is built with CUDA "
            f"{torch.version.cuda}: set CUDA_HOME to a toolkit of CUDA {major}, or FORCE_CPU=1 to build without CUDA"
        )
    return release


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
    """Why, and how to fix it, or None."""
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


def minor(version):
    return tuple(map(int, version.split(".")[:2]))


def folder_of(version):
    return "torch_{}_{}".format(*minor(version))


def version_in(root):
    if not (root / "version.py").exists():
        sys.exit(f"activations-cuda: TORCH_FOLDERS: expected folders of torch, got {root}")
    version = runpy.run_path(root / "version.py")["__version__"]
    return version.partition("+")[0]  # the binding is for all builds of that release


toolkit = find_toolkit()
reason = why_not_cuda(toolkit)
folders = [Path(folder).resolve() for folder in os.environ.get("TORCH_FOLDERS", "").split(":") if folder]
forced_by = "TORCH_FOLDERS" if folders else "FORCE_CUDA" if flag("FORCE_CUDA") else None
if reason and forced_by:
    sys.exit("activations-cuda: {} is set, but {}: {}".format(forced_by, *reason))
installed = Path(torch.__file__).parent
# Folders of torch, by version.
torches = {version_in(folder): folder for folder in folders} or {str(torch.__version__): installed}

for version in torches:
    if minor(version) < OLDEST and "sdist" not in sys.argv:
        sys.exit("activations-cuda: expected torch {}.{} or newer, got {}".format(*OLDEST, version))
cuda = None if reason else release_of(toolkit)
if reason:
    print("activations-cuda: building for the CPU only: {}".format(*reason))
else:
    os.environ["CUDA_HOME"] = str(toolkit)  # read when torch.utils.cpp_extension is imported
    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = supported_archs(toolkit)

from torch.utils.cpp_extension import BuildExtension  # noqa: E402


class BuildWithRecord(BuildExtension):
    """Leaves beside the bindings what they were built for, which Python must know before it loads one."""

    def finalize_options(self):
        super().finalize_options()
        self.force = True  # ninja knows what is stale: what includes an edited header too
        # pip would build in a new folder each time.
        device = "cpu" if reason else "cuda"
        self.build_temp = f"build/{sys.implementation.cache_tag}-torch-{torch.__version__}-{device}"

    def run(self):
        check_compiler()
        for stale in Path(self.build_lib, "activations_cuda").glob("**/*.so"):
            stale.unlink()  # or another torch's bindings would come into a wheel
        super().run()
        built = {folder_of(version): version for version in torches}
        record = Path(self.get_ext_fullpath("activations_cuda._build")).with_name("_build.py")
        record.write_text(
            "# Written by setup.py.\n"
            f"version = {self.distribution.get_version()!r}\n"
            f"commit = {commit()!r}\n"
            f"torches = {built!r}\n"
            f"cuda = {cuda!r}\n"
            f"archs = {[] if cuda is None else os.environ['TORCH_CUDA_ARCH_LIST'].replace(' ', ';').split(';')!r}\n"
        )

    def build_extension(self, extension):
        folder, self.build_temp = self.build_temp, f"{self.build_temp}/{extension.name}"  # two bindings share their sources
        if extension.name.endswith("._C"):
            extension.sources = self.joined(extension.sources)
        extension.library_dirs.append(f"{self.build_lib}/activations_cuda")  # where the kernels are, which come first
        super().build_extension(extension)
        self.build_temp = folder

    def joined(self, sources):
        """One source for each folder, which includes the folder's: most of what a compiler reads is PyTorch's headers."""
        files = []
        for folder, names in groupby(sorted(sources, key=os.path.dirname, reverse=True), key=os.path.dirname):
            text = "".join(f'#include "{os.path.abspath(name)}"\n' for name in names)
            file = Path(self.build_temp, folder).with_suffix(".cpp")
            if not file.exists() or file.read_text() != text:  # ninja looks at its time
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            files.append(str(file))
        return files

    def get_ext_filename(self, name):
        is_kernels = name.rpartition(".")[2] in KERNELS  # no Python module, so without the ABI in its name
        return name.replace(".", "/") + ".so" if is_kernels else super().get_ext_filename(name)

    def copy_extensions_to_source(self):
        for version in torches:
            Path("activations_cuda", folder_of(version)).mkdir(exist_ok=True)
        super().copy_extensions_to_source()


# -O1, which compiles in two thirds of the time, if CFLAGS ask for it; but no distribution's -O2, which comes before these.
# -ffp-contract=off, -fmad=false: the formulas mean what they say, alpha * x + beta has two roundings on every machine.
# -fno-trapping-math: without it the compiler vectorizes no conversion from half.
# -falign-loops: where a loop begins is a matter of luck otherwise (backward of 2^22 float16 elements: 5 to 28%).
# --threads: one for each architecture, of which a wheel has several.
# -fopenmp: at::parallel_for, a template, is serial without it. It is not given to the linker, so that the calls meet the OpenMP
# library that torch has loaded, with torch's threads, and not a second one. clang's calls are another library's, LLVM's.
COMPILE_ARGS = {
    "cxx": [
        "-O1" if "-O1" in os.environ.get("CFLAGS", "").split() else "-O3",
        "-g0",
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-fno-math-errno",
        "-falign-loops=32",
        "-fopenmp",
        "-fvisibility=hidden",
    ],
    "nvcc": ["-O3", "-fmad=false", "-Xcompiler=-fvisibility=hidden", "--ptxas-options=-v,--warn-on-spills", "--threads=4"],
}
KERNELS = ["libfastact_cpu", *(["libfastact_cuda"] if cuda else [])]


def extension(name, sources, root, libraries=(), library_dirs=(), link_args=()):
    include_dirs = [root / "include", root / "include/torch/csrc/api/include"]
    return Extension(
        f"activations_cuda.{name}",
        sorted(glob(sources, recursive=True), reverse=True),  # recipes, which take longest to compile, first
        include_dirs=list(map(str, include_dirs)),
        library_dirs=list(map(str, library_dirs)),
        libraries=list(libraries),
        define_macros=[
            ("FASTACT_VERSION", f'"{VERSION}"'),
            ("AT_PER_OPERATOR_HEADERS", None),  # or PyTorch's headers bring in each of its ops
            ("NDEBUG", None),  # as PyTorch is built, whose RecordFunction is laid out by it
            *([("FASTACT_CUDA", None)] if cuda else []),
        ],
        extra_compile_args=copy.deepcopy(COMPILE_ARGS),  # to which BuildExtension adds
        extra_link_args=list(link_args),
        language="c++",
    )


def kernels(name):
    if name == "libfastact_cpu":
        return extension(name, "csrc/*/cpu/*.cpp", installed)
    folders = [toolkit / "lib64", toolkit / "lib", *toolkit.glob("targets/*/lib")]
    return extension(name, "csrc/**/*.cu", installed, ["cudart"], folders)


def binding(version, root):
    return extension(
        f"{folder_of(version)}._C",
        "csrc/binding/**/*.cpp",
        root,
        ["c10", "torch", "torch_cpu", "torch_python"],
        [root / "lib"],
        # Not libfastact_cuda, which builds of torch without CUDA can't load: see csrc/runtime.h.
        ["-Wl,-rpath,$ORIGIN/..", "-l:libfastact_cpu.so", *(["-fopenmp"] if is_clang() else [])],
    )


def requirement():
    if "sdist" in sys.argv:
        return TORCH
    minors = sorted(set(map(minor, torches)))
    (major, first), (last_major, last) = minors[0], minors[-1]
    return f"torch=={major}.{first}.*" if len(minors) == 1 else f"torch>={major}.{first},<{last_major}.{last + 1}"


setup(
    version=VERSION,
    install_requires=[requirement(), "tabulate"],  # which prints memory_report's table
    ext_modules=[*map(kernels, KERNELS), *starmap(binding, torches.items())],
    cmdclass={"build_ext": BuildWithRecord},
)
