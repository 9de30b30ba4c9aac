"""Type checkers know the public functions, and what the decorators keep."""

import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
USER_CODE = HERE / "typing" / "user_code.py"


def test_a_users_program_is_checked_as_it_says():
    lines = USER_CODE.read_text().splitlines()
    wrong = {n for n, line in enumerate(lines) if line.endswith("# error")}
    assert wrong
    result = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", USER_CODE],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = json.loads(result.stdout)["generalDiagnostics"]
    messages = {
        each["range"]["start"]["line"]: each["message"] for each in found
    }
    assert set(messages) == wrong, messages
