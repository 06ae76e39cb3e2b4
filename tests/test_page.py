"""The tests of the page's pure modules are written for Node, and run here."""

import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def test_the_page_passes_its_tests_in_node(node_path):
    command = [node_path, "--test", HERE / "page.test.mjs"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, f"{done.stdout[-20000:]}{done.stderr}"
