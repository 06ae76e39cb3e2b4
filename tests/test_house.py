"""What keeps the house in order: its map, its silent room, its lists, who imports whom."""

import ast
import builtins
import itertools
import json
import re
import sys
from pathlib import Path

import pytest

import hermes_voice
from hermes_voice import (
    CLIENT_EVENTS,
    CONFIG_CHECKS,
    DEFAULT_HERMES_URL,
    DEFAULT_LISTEN,
    DEFAULT_OPENAI_URL,
    MEDIA_TYPES,
    ROUTES,
    RUN_UPDATES,
    SECURITY_HEADERS,
    SERVER_EVENTS,
    Config,
    ConfigError,
    VoiceError,
    parse_arguments,
)

ROOT = Path(__file__).parent.parent
STATIC = ROOT / "static"
SOURCE = (ROOT / "hermes_voice.py").read_text()
LINES = SOURCE.splitlines()
TREE = ast.parse(SOURCE)
README = (ROOT / "README.md").read_text()
BANNER = re.compile(r"# ---- ([a-z ]+?) -+$")
PURE_ROOMS = ("talk", "answers", "approvals", "events", "run book", "meter", "pairing")
ROOM_LINES = 600  # about; a room that is longer wants a wall


def sections():
    """The section of every statement at the top level, in order: name to statements."""
    starts = [(number, match[1]) for number, line in enumerate(LINES, 1) if (match := BANNER.match(line))]
    found = {"": [], **{name: [] for _, name in starts}}
    for statement in TREE.body:
        name = [name for number, name in starts if number < statement.lineno][-1:] or [""]
        found[name[0]].append(statement)
    return found


SECTIONS = sections()


def defined_by(statement):
    """The names that a statement at the top level defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    targets = getattr(statement, "targets", [getattr(statement, "target", statement)])
    names = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def used_by(statements):
    """All names that statements read, whatever they are."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


# ---- the server --------------------------------------------------------------


def test_the_docstrings_map_is_the_banners_in_their_order():
    map_ = re.findall(r"^    ([a-z]+(?: [a-z]+)?)  +\S", ast.get_docstring(TREE), re.MULTILINE)

    assert map_ == [name for name in SECTIONS if name]


def test_every_banner_is_as_long_as_the_others():
    banners = [line for line in LINES if line.startswith("# ---")]

    assert {len(line) for line in banners} == {80}
    assert all(BANNER.fullmatch(line) for line in banners)


def test_every_room_says_what_it_is_and_can_be_overlooked():
    starts = [number for number, line in enumerate(LINES) if BANNER.match(line)]

    for number, end in itertools.pairwise([*starts, len(LINES)]):
        assert LINES[number + 1 : number + 3][0] == "#", LINES[number]
        assert LINES[number + 2].startswith("# "), LINES[number]
        assert end - number <= ROOM_LINES, LINES[number]


def test_each_section_uses_only_names_defined_above_it():
    everything = {name for found in SECTIONS.values() for s in found for name in defined_by(s)}
    known = set()
    for section, statements in SECTIONS.items():
        known |= {name for statement in statements for name in defined_by(statement)}

        later = (used_by(statements) & everything) - known

        assert not later, f"{section} uses {later}"


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_silent_room_does_no_io(room):
    names = used_by(SECTIONS[room])
    noisy = {
        *("urllib", "socket", "http", "ssl", "threading", "queue", "time", "log", "log_event", "logging"),
        *("open", "print", "input", "Path", "os", "sys", "secrets", "signal", "tempfile", "exec", "eval"),
    }

    assert names
    assert not names & noisy


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_silent_room_reads_no_settings(room):
    of_config = {name for other in ("config", "secrets") for s in SECTIONS[other] for name in defined_by(s)}

    assert not used_by(SECTIONS[room]) & (of_config - set(dir(builtins)))


def subclasses(error):
    yield error
    for child in error.__subclasses__():
        yield from subclasses(child)


@pytest.mark.parametrize("error", [*subclasses(VoiceError)], ids=lambda error: error.__name__)
def test_every_error_has_a_status_a_code_and_a_docstring(error):
    assert error.__doc__.strip().endswith(".")
    assert 400 <= error.status < 600
    assert re.fullmatch(r"[a-z_]+", error.code)


def test_error_codes_differ():
    codes = [error.code for error in subclasses(VoiceError)]

    assert len(set(codes)) == len(codes)


def test_an_error_is_given_no_fact_that_its_class_does_not_name():
    errors = {error.__name__: error for error in subclasses(VoiceError)}
    calls = [node for node in ast.walk(TREE) if isinstance(node, ast.Call)]
    raised = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in errors]

    assert raised
    for call in raised:
        assert all(hasattr(errors[call.func.id], fact.arg) for fact in call.keywords), ast.unparse(call)


def test_what_is_wrong_at_the_start_is_never_http():
    assert not issubclass(ConfigError, VoiceError)


FUNCTIONS = [node for node in ast.walk(TREE) if isinstance(node, ast.FunctionDef)]


def length(function):
    return function.end_lineno - function.lineno + 1


def test_functions_are_short():
    lengths = sorted(map(length, FUNCTIONS))

    assert lengths[-1] <= 50
    assert lengths[len(lengths) * 9 // 10] < 25


def test_what_others_call_says_what_it_does():
    for section in set(SECTIONS) - {""}:
        for node in SECTIONS[section]:
            inner = [*node.body] if isinstance(node, ast.ClassDef) else []
            for item in [node, *inner]:
                if isinstance(item, ast.FunctionDef | ast.ClassDef) and not item.name.startswith("_"):
                    assert ast.get_docstring(item), item.name


def test_nothing_at_the_top_level_runs_but_main():
    docstring, *others, last = TREE.body
    quiet = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)

    assert isinstance(docstring, ast.Expr)
    (guard,) = [statement for statement in others if not isinstance(statement, quiet)]
    assert ast.unparse(guard).startswith("if sys.version_info < (3, 11):\n")
    assert ast.unparse(last) == "if __name__ == '__main__':\n    sys.exit(main())"


def test_no_function_writes_a_global():
    assert not [node for node in ast.walk(TREE) if isinstance(node, ast.Global | ast.Nonlocal)]


def test_only_the_standard_library_is_imported():
    nodes = [*ast.walk(TREE)]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}

    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_no_machine_is_named():
    for path in [ROOT / "hermes_voice.py", *STATIC.iterdir()]:
        assert not re.search(r"/home/|/root/|/work/|/tmp/", path.read_text()), path.name


# ---- the page ----------------------------------------------------------------

SCRIPTS = {path.name: path.read_text() for path in sorted(STATIC.glob("*.js"))}
PAGE = (STATIC / "index.html").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_markup_or_code_from_text(name):
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|ContextualFragment|srcdoc"
    code = r"\beval\(|new Function\(|set(?:Timeout|Interval)\(\s*[\"'`]"

    assert not re.findall(f"{markup}|{code}", SCRIPTS[name])


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_reaches_for_another_host(name):
    addresses = re.findall(r"[\"'`(](?:(?:https?|wss?):)?//([\w.-]+)", SCRIPTS[name])

    assert set(addresses) <= {"localhost"}


def test_the_page_has_no_inline_code_or_style_and_one_script():
    assert not re.findall(r"\son\w+\s*=|\sstyle\s*=|<style|javascript:|<base|<iframe", PAGE)
    scripts = re.findall(r"<script.*?</script>", PAGE, re.DOTALL)
    assert scripts == ['<script type="module" src="app.js"></script>']


def test_the_page_loads_only_its_own_files():
    linked = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)""", PAGE)

    assert linked
    assert all((STATIC / name).is_file() for name in linked)
    assert not re.search(r"url\(|@import", (STATIC / "style.css").read_text())


def test_the_policy_allows_nothing_inline_and_nobody_else():
    policy = SECURITY_HEADERS["Content-Security-Policy"]

    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "*" not in policy


def imports(name):
    static = r"""^(?:import|export)\b[^;]*?["']\./([\w.]+)["'];"""
    dynamic = r"""\bawait import\(["']\./([\w.]+)["']\);"""
    return {found for form in (static, dynamic) for found in re.findall(form, SCRIPTS[name], re.MULTILINE)}


EDGES = {"api.js", "rtc.js", "view.js", "demo.js"} & set(SCRIPTS)
HALL = "app.js"
PURE = set(SCRIPTS) - EDGES - {HALL, "markdown.js"}


def test_only_the_hall_knows_the_edges_and_nobody_knows_the_hall():
    assert imports(HALL) >= EDGES
    for name in set(SCRIPTS) - {HALL}:
        assert not imports(name) & (EDGES | {HALL}), name


def test_pure_modules_use_pure_modules_only():
    assert {"call.js", "transcript.js", "wire.js", "speech.js", "meter.js", "watch.js", "phrases.js"} <= PURE
    for name in PURE:
        assert imports(name) <= PURE, name


# Each may use those before it.
ROOMS = [
    *("state.js", "status.js", "questions.js", "runs.js", "late.js"),
    *("voice.js", "session.js", "words.js", "call.js"),
]


def test_the_rooms_of_the_call_use_each_other_one_way():
    assert set(ROOMS) <= PURE
    for number, name in enumerate(ROOMS):
        assert not imports(name) & set(ROOMS[number:]), name
    assert imports("call.js") <= set(ROOMS)


def test_every_import_is_a_file_of_the_page_and_used():
    for name, text in SCRIPTS.items():
        assert imports(name) <= set(SCRIPTS), name
        assert not re.findall(r"""from\s+["'](?!\./)""", text), name
    assert {other for name in SCRIPTS for other in imports(name)} | {HALL} == set(SCRIPTS)


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_touch_no_page_no_network_and_no_clock(name):
    code = re.sub(r"//.*|/\*(?:[^*]|\*(?!/))*\*/", "", SCRIPTS[name])
    noisy = r"\b(?:document|window|localStorage|sessionStorage|navigator|fetch|setTimeout|setInterval)\b"

    assert not re.findall(noisy + r"|Date\.now|performance\.now|Math\.random|crypto\.", code)


def test_every_file_of_the_page_has_a_known_media_type():
    assert {path.suffix for path in STATIC.iterdir()} <= set(MEDIA_TYPES)
    assert all(path.is_file() for path in STATIC.iterdir())


# ---- lists that must agree ---------------------------------------------------


def test_the_data_channel_allows_what_wire_reads_and_no_more():
    table = re.search(r"const FROM_VOICE = .*?\n\}", SCRIPTS["wire.js"], re.DOTALL)[0]

    assert set(re.findall(r'^  "?([\w.]+)"?: ', table, re.MULTILINE)) == set(SERVER_EVENTS)


def test_the_data_channel_allows_what_wire_sends_and_no_more():
    code = SCRIPTS["wire.js"].partition("export function fromVoice")[2]
    sent = set(re.findall(r'"(session\.[\w.]+)"', code))
    for stem, one, other in re.findall(r'`(session\.[\w.]+)\$\{\w+ \? "(\w+)" : "(\w+)"\}`', code):
        sent |= {stem + one, stem + other}

    assert sent == set(CLIENT_EVENTS)


def test_the_demos_voice_knows_no_other_events():
    named = set(re.findall(r'"(session\.[\w.]+)"', SCRIPTS["demo.js"]))

    assert {"session.started", "session.delegation.created"} <= named
    assert named <= {*SERVER_EVENTS, *CLIENT_EVENTS}


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, *_ in ROUTES])
def test_every_route_is_in_the_readme(method, path):
    assert re.search(rf"\b{method} {re.escape(path)}(?![\w/])", README)


@pytest.mark.parametrize("key", CONFIG_CHECKS)
def test_every_config_key_is_in_the_readme_with_its_default(key):
    default = json.dumps(getattr(Config(), key), ensure_ascii=False)

    (found,) = re.findall(rf"^\| `{key}` \| `(.*?)` \|", README, re.MULTILINE)
    assert found == default


def test_the_readme_has_no_other_config_keys():
    table = README.partition("| key | default |")[2].partition("\n\n")[0]

    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(CONFIG_CHECKS)


def test_every_flag_is_in_the_readme_and_no_other(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    flags = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    table = README.partition("| flag | default |")[2].partition("\n\n")[0]

    assert set(re.findall(r"^\| `(--[a-z-]+)`", table, re.MULTILINE)) == flags


def test_every_default_of_a_flag_is_in_the_readme():
    assert f"| `--listen` | `{DEFAULT_LISTEN}` |" in README
    assert f"| `--hermes-url` | `{DEFAULT_HERMES_URL}` |" in README
    assert f"| `--openai-base-url` | `{DEFAULT_OPENAI_URL}` |" in README


def test_the_readmes_limits_are_the_programs():
    for name in ("INSTRUCTIONS_LIMIT", "GLOSSARY_LIMIT"):
        limit = getattr(hermes_voice, name)
        assert f"at most {limit:,}" in README, name


def test_every_event_that_is_understood_was_once_recorded():
    recorded = set()
    for path in (ROOT / "tests" / "fixtures").glob("hermes-*/*.json"):
        recorded |= set(re.findall(r'\\"event\\": \\"([\w.]+)\\"', path.read_text()))

    assert set(RUN_UPDATES) <= recorded


def test_every_file_that_the_readme_links_to_is_there():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_version_is_in_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+", hermes_voice.__version__)
    assert SOURCE.count(f'"{hermes_voice.__version__}"') == 1
    assert 'version = { attr = "hermes_voice.__version__" }' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("ours", "file", "theirs"),
    [
        ("TOOLS_KEPT", "runs.js", "TOOLS_KEPT"),
        ("QUESTIONS_KEPT", "runs.js", "QUESTIONS_KEPT"),
        ("RUNS_LISTED", "runs.js", "RUNS_KEPT"),
        ("LINES_LISTED", "transcript.js", "LINES_KEPT"),
    ],
)
def test_the_journal_gives_as_much_as_a_page_shows(ours, file, theirs):
    (kept,) = re.findall(rf"const {theirs} = (\d+);", (STATIC / file).read_text())

    assert getattr(hermes_voice, ours) == int(kept)
