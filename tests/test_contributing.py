"""What CONTRIBUTING.md tells one to write for a new member of the family is all that it takes."""

import re
import sys

import pytest

import mutations
from trees import FROM_SOURCE, ROOT, copy, install, run

MUTANTS = [mutations.UNBROKEN, *mutations.SHARED, *mutations.ON["cpu"], *mutations.ON["cuda"], *mutations.RECOMPUTE]


@FROM_SOURCE
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_applies(mutant):
    """python tests/mutations.py builds each of them and takes an hour; that the code is still there is soon told."""
    assert (ROOT / mutant.file).read_text().count(mutant.code) == 1


class Tree:
    """A copy of the source tree, to be edited and built."""

    def __init__(self, folder):
        self.root, self.site = folder / "tree", str(folder / "site")
        copy(self.root)

    def insert(self, path, before, text):
        file = self.root / path
        parts = file.read_text().rpartition(before)
        assert parts[1] == before
        file.write_text(parts[0] + text + before + parts[2])

    def add(self, name, section, struct_file, struct_end, line_before, row_before):
        """Apply the four blocks of a section of CONTRIBUTING.md."""
        text = (ROOT / "CONTRIBUTING.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
        struct, line, row, function = re.findall(r"```(?:cpp|python)\n(.*?)```", text, re.DOTALL)
        self.insert(struct_file, struct_end, struct + "\n")
        self.insert("csrc/family.def", line_before, line)
        self.insert("tests/family.py", row_before, row)
        functional = self.root / "activations_cuda/functional.py"
        functional.write_text(functional.read_text().replace("__all__ = [", f'__all__ = ["{name}", ') + "\n\n" + function)

    def test(self, name, *files):
        result = run(sys.executable, "-m", "pytest", "-k", name, *files, cwd=self.root / "tests", PYTHONPATH=self.site)
        assert result.returncode == 0, result.stdout
        return int(re.search(r"(\d+) passed", result.stdout)[1])


@pytest.mark.slow
@FROM_SOURCE
def test_new_members(tmp_path):
    tree = Tree(tmp_path)
    piecewise_linear = "csrc/bits/activations.h", "}  // namespace fastact", "\n// Smooth:", "]\nA_FEW"
    tree.add("relu_n", "A new piecewise-linear member", *piecewise_linear)
    smooth = "csrc/binding/codes/activations.h", "// The activation with this name", "\n#undef ACTIVATION", "]\nHALF_TYPES"
    tree.add("swish", "A new smooth member", *smooth)
    install(tree.root, tree.site, FORCE_CPU="1", CFLAGS="-O1")

    tests = ["test_exact.py", "test_mask.py", "test_autograd.py", "test_transforms.py", "test_inplace.py", "test_errors.py"]
    assert tree.test("relu_n", *tests) > 100
    assert tree.test("swish", "test_smooth.py") > 30
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from activations_cuda import relu_n, swish\n"
        "def function(x):\n"
        "    return relu_n(x, 2.0), swish(x)\n"
        "for function in function, torch.compile(function, backend='aot_eager', fullgraph=True):\n"
        "    clamped, smooth = function(torch.tensor([-1.0, 1.0, 9.0]))\n"
        "    assert clamped.tolist() == [0.0, 1.0, 2.0]\n"
        "    assert torch.equal(smooth, torch.nn.functional.silu(torch.tensor([-1.0, 1.0, 9.0])))\n"
    )
    result = run(sys.executable, str(program), cwd=tmp_path, PYTHONPATH=tree.site)
    assert result.returncode == 0, result.stderr
