"""Commands that compute nothing start at once, as they import neither torch nor NumPy."""

import subprocess
import sys


def test_the_command_line_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, leaderless.cli.main; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
