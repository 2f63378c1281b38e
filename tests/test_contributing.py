"""What CONTRIBUTING.md tells one to write for a new member of the family is all that it takes."""

import re
import sys

import pytest

import mutations
from trees import FROM_SOURCE, ROOT, copy, install, run


@FROM_SOURCE
@pytest.mark.parametrize(
    "mutant", [mutations.UNBROKEN, *mutations.SHARED, *mutations.ON["cpu"], *mutations.ON["cuda"]], ids=str
)
def test_a_mutant_applies(mutant):
    """python tests/mutations.py builds each of them and takes an hour; that the code is still there is soon told."""
    assert mutant.code in (ROOT / mutant.file).read_text()


@FROM_SOURCE
def test_a_new_member(tmp_path):
    tree = tmp_path / "tree"
    copy(tree)
    struct, line, row, function = re.findall(r"```(?:cpp|python)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)

    def insert(path, before, text):
        file = tree / path
        parts = file.read_text().rpartition(before)
        assert parts[1] == before
        file.write_text(parts[0] + text + before + parts[2])

    insert("csrc/activations.h", "\n}  // namespace fastact", "\n" + struct)
    insert("csrc/family.def", "#undef ACTIVATION", line)
    insert("tests/family.py", "]\nA_FEW", row)
    functional = tree / "activations_cuda/functional.py"
    functional.write_text(functional.read_text().replace("__all__ = [", '__all__ = ["relu_n", ') + "\n\n" + function)

    site = str(tmp_path / "site")
    install(tree, site, FORCE_CPU="1")
    tests = ["test_exact.py", "test_mask.py", "test_autograd.py", "test_transforms.py", "test_inplace.py", "test_errors.py"]
    result = run(sys.executable, "-m", "pytest", "-k", "relu_n", *tests, cwd=tree / "tests", PYTHONPATH=site)
    assert result.returncode == 0, result.stdout
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 100
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from activations_cuda import relu_n\n"
        "for function in relu_n, torch.compile(relu_n, backend='aot_eager', fullgraph=True):\n"
        "    assert function(torch.tensor([-1.0, 1.0, 9.0]), 2.0).tolist() == [0.0, 1.0, 2.0]\n"
    )
    result = run(sys.executable, str(program), cwd=tmp_path, PYTHONPATH=site)
    assert result.returncode == 0, result.stderr
