"""The tests of the page's pure modules are written for Node, and run here."""

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def test_the_page_passes_its_tests_in_node(node_path, capsys):
    command = [node_path, "--test", "--test-reporter=tap", HERE / "page.test.mjs"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, f"{done.stdout[-20000:]}{done.stderr}"
    figures = re.search(r"^ *# (ms from the last word.*?are missing: 0)$", done.stdout, re.M | re.S)
    assert figures, "no figures of settling"
    with capsys.disabled():
        print("\n" + re.sub(r"(?m)^ *# ", "", figures[1]))
