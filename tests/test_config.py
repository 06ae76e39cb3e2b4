"""Each bad setting gives one clear message; good ones come out checked. And the prompts."""

import json
import os
import re
from ipaddress import ip_network
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_voice import (
    BACKEND_NOTE,
    CONFIG_CHECKS,
    DELEGATION,
    GLOSSARY_LIMIT,
    INSTRUCTIONS_LIMIT,
    MODELS,
    SECRET_LIMIT,
    TERM_LIMIT,
    VOICES,
    Config,
    ConfigError,
    Term,
    backend_note,
    build_server,
    check_url,
    checked_secret,
    dotenv_value,
    find_secret,
    is_address,
    is_loopback,
    load_config,
    parse_arguments,
    parse_config,
    parse_listen,
    persona,
    read_secret,
)

ROOT = Path(__file__).parent.parent
KEY = "k" * 32
as_anybody = pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")


def problems_of(function, *args):
    with pytest.raises(ConfigError) as raised:
        function(*args)
    return raised.value.problems


# ---- the config file ---------------------------------------------------------


def test_without_a_file_everything_is_at_its_default():
    assert load_config(None) == (Config(), [])


def test_an_empty_object_is_the_default_too():
    assert parse_config({}) == (Config(), [])


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({"model": "gpt-live-1.1"}, {"model": "gpt-live-1.1"}),
        ({"voice": " cedar "}, {"voice": "cedar"}),
        ({"voice": {"id": "voice_a1"}}, {"voice": {"id": "voice_a1"}}),
        ({"voice": "voice_a1"}, {"voice": {"id": "voice_a1"}}),
        ({"language": "German"}, {"language": "German"}),
        ({"instructions": "\nBe brief.\n"}, {"instructions": "Be brief."}),
        ({"glossary": ["Nginx"]}, {"glossary": (Term("Nginx"),)}),
        (
            {"glossary": [{"term": " Home \n Assistant ", "spoken": "hass"}, {"term": "b"}]},
            {"glossary": (Term("Home Assistant", "hass"), Term("b"))},
        ),
        ({"idle_seconds": 30}, {"idle_seconds": 30}),
        ({"idle_seconds": 7200}, {"idle_seconds": 7200}),
        ({"approval_seconds": 0}, {"approval_seconds": 0}),
        ({"greeting": " Hello. "}, {"greeting": "Hello."}),
        ({"progress": "chatty"}, {"progress": "chatty"}),
        ({"standby_seconds": 0}, {"standby_seconds": 0}),
        ({"on_long_run": "hang_up"}, {"on_long_run": "hang_up"}),
        ({"call_minutes": 0, "day_minutes": 1440}, {"call_minutes": 0, "day_minutes": 1440}),
        ({"price_per_minute": 0}, {"price_per_minute": 0}),
        ({"standby_price_per_minute": 0.5}, {"standby_price_per_minute": 0.5}),
        ({"currency": "€"}, {"currency": "€"}),
        ({"voice_approvals": False}, {"voice_approvals": False}),
        ({"hang_up_phrases": []}, {"hang_up_phrases": ()}),
        ({"stop_speaking_phrases": [" Hush "]}, {"stop_speaking_phrases": ("Hush",)}),
        ({"public_hosts": ["Voice.Example.org.", "a"]}, {"public_hosts": ("voice.example.org", "a")}),
        (
            {"trusted_proxies": ["127.0.0.1", "fd00::/8"]},
            {"trusted_proxies": (ip_network("127.0.0.1/32"), ip_network("fd00::/8"))},
        ),
    ],
)
def test_good_values_are_taken(given, used):
    assert parse_config(given) == (Config(**used), [])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([], "must be a JSON object"),
        (None, "must be a JSON object"),
        ({"modle": "x"}, "unknown key 'modle'; did you mean 'model'?"),
        ({"idle_second": 60}, "unknown key 'idle_second'; did you mean 'idle_seconds'?"),
        ({"publichosts": []}, "unknown key 'publichosts'; did you mean 'public_hosts'?"),
        (
            {"zzz": 1},
            f"unknown key 'zzz'; known keys: {', '.join(CONFIG_CHECKS)}",
        ),
        ({"model": 1}, "'model' must be a string"),
        ({"model": " "}, "'model' must not be empty"),
        ({"model": "m" * 101}, "'model' must have at most 100 characters, has 101"),
        ({"voice": None}, "'voice' must be a string"),
        ({"voice": ""}, "'voice' must not be empty"),
        ({"voice": {"name": "marin"}}, """'voice' must be a voice's name or {"id": "voice_..."}"""),
        ({"voice": {"id": "marin"}}, """'voice' must be a voice's name or {"id": "voice_..."}"""),
        ({"voice": {"id": 5}}, """'voice' must be a voice's name or {"id": "voice_..."}"""),
        ({"voice": {"id": "voice_a", "x": 1}}, """'voice' must be a voice's name or {"id": "voice_..."}"""),
        ({"language": ["German"]}, "'language' must be a string"),
        ({"instructions": "i" * 8001}, "'instructions' must have at most 8000 characters, has 8001"),
        ({"glossary": "Nginx"}, f"'glossary' must be a list of at most {GLOSSARY_LIMIT} terms"),
        ({"glossary": ["a"] * 101}, f"'glossary' must be a list of at most {GLOSSARY_LIMIT} terms"),
        ({"glossary": [5]}, """'glossary' entries must be strings or {"term": ..., "spoken": ...}"""),
        (
            {"glossary": [{"spoken": "x"}]},
            """'glossary' entries must be strings or {"term": ..., "spoken": ...}""",
        ),
        (
            {"glossary": [{"term": "a", "note": "b"}]},
            """'glossary' entries must be strings or {"term": ..., "spoken": ...}""",
        ),
        ({"glossary": ["a", {"term": 5}]}, "'glossary' entry 2 must be a string"),
        ({"glossary": ["t" * 81]}, "'glossary' entry 1 must have at most 80 characters, has 81"),
        ({"glossary": [" "]}, "'glossary' must not hold an empty term"),
        ({"idle_seconds": 29}, "'idle_seconds' must be a whole number from 30 to 7200"),
        ({"idle_seconds": 7201}, "'idle_seconds' must be a whole number from 30 to 7200"),
        ({"idle_seconds": 60.0}, "'idle_seconds' must be a whole number from 30 to 7200"),
        ({"idle_seconds": "60"}, "'idle_seconds' must be a whole number from 30 to 7200"),
        ({"approval_seconds": -1}, "'approval_seconds' must be a whole number from 0 to 86400"),
        ({"approval_seconds": True}, "'approval_seconds' must be a whole number from 0 to 86400"),
        ({"greeting": "g" * 301}, "'greeting' must have at most 300 characters, has 301"),
        ({"progress": "loud"}, "'progress' must be one of off, quiet, normal, chatty"),
        ({"standby_seconds": -1}, "'standby_seconds' must be a whole number from 0 to 7200"),
        ({"on_long_run": "leave"}, "'on_long_run' must be one of stay, hang_up"),
        ({"long_run_seconds": 29}, "'long_run_seconds' must be a whole number from 30 to 7200"),
        ({"call_minutes": 1441}, "'call_minutes' must be a whole number from 0 to 1440"),
        ({"day_minutes": 0.5}, "'day_minutes' must be a whole number from 0 to 1440"),
        *(
            ({key: price}, f"{key!r} must be a number from 0 to 1000")
            for key in ("price_per_minute", "standby_price_per_minute")
            for price in (-0.01, 1001, True, "0.05", float("nan"), float("inf"), None)
        ),
        ({"currency": "c" * 11}, "'currency' must have at most 10 characters, has 11"),
        ({"voice_approvals": "no"}, "'voice_approvals' must be true or false"),
        ({"voice_approvals": 0}, "'voice_approvals' must be true or false"),
        ({"hang_up_phrases": "bye"}, "'hang_up_phrases' must be a list of at most 100 phrases"),
        ({"go_on_phrases": [""]}, "'go_on_phrases' must not hold an empty phrase"),
        ({"repeat_phrases": [5]}, "'repeat_phrases' must be a string"),
        ({"retry_phrases": {}}, "'retry_phrases' must be a list of at most 100 phrases"),
        ({"stop_speaking_phrases": [""]}, "'stop_speaking_phrases' must not hold an empty phrase"),
        ({"history_days": 0}, "'history_days' must be a whole number from 1 to 36500"),
        ({"on_new_request": "stear"}, "'on_new_request' must be one of steer, restart, queue"),
        ({"on_new_request": ["steer"]}, "'on_new_request' must be one of steer, restart, queue"),
        ({"stop_phrases": "stop"}, "'stop_phrases' must be a list of at most 100 phrases"),
        ({"stop_phrases": ["stop"] * 101}, "'stop_phrases' must be a list of at most 100 phrases"),
        ({"stop_phrases": [5]}, "'stop_phrases' must be a string"),
        ({"stop_phrases": ["stop", " "]}, "'stop_phrases' must not hold an empty phrase"),
        ({"stop_phrases": ["s" * 81]}, "'stop_phrases' must have at most 80 characters, has 81"),
        ({"public_hosts": "a"}, "'public_hosts' must be a list of at most 50 host names"),
        ({"public_hosts": ["a"] * 51}, "'public_hosts' must be a list of at most 50 host names"),
        ({"public_hosts": [5]}, "'public_hosts' entries must be a string"),
        (
            {"trusted_proxies": "10.0.0.1"},
            "'trusted_proxies' must be a list of at most 50 addresses or networks",
        ),
        (
            {"trusted_proxies": ["::1"] * 51},
            "'trusted_proxies' must be a list of at most 50 addresses or networks",
        ),
        ({"trusted_proxies": [167772161]}, "'trusted_proxies' entries must be a string"),
        *(
            (
                {"trusted_proxies": [text]},
                f"'trusted_proxies' holds {text!r}; give addresses, or networks such as '10.0.0.0/8'",
            )
            for text in ("", "localhost", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.1:80", "[::1]", "*", "10.0.0")
        ),
        *(
            (
                {"public_hosts": [host]},
                f"'public_hosts' holds {host.lower()!r}; give bare names without scheme, port or wildcard",
            )
            for host in ("https://a.org", "a.org:443", "*.a.org", "", "a b", "a/b", "-a", "Ä.org")
        ),
    ],
)
def test_a_bad_value_gives_one_clear_message(values, problem):
    assert problems_of(parse_config, values) == [problem]


def test_all_problems_are_reported_together():
    problems = problems_of(parse_config, {"modle": 1, "idle_seconds": 1, "voice": 5, "language": "German"})

    assert [problem.split("'")[1] for problem in problems] == ["modle", "idle_seconds", "voice"]


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        (
            {"model": "gpt-live-9"},
            "model 'gpt-live-9' is not one of gpt-live-1, gpt-live-1.1; it is used as it is",
        ),
        ({"voice": "marina"}, "voice 'marina' is not a known built-in voice; did you mean 'marin'?"),
        ({"voice": "zzz"}, "voice 'zzz' is not a known built-in voice"),
    ],
)
def test_what_may_be_newer_than_this_program_is_only_warned_about(values, warning):
    config, warnings = parse_config(values)

    assert warnings == [warning]
    assert getattr(config, next(iter(values))) == next(iter(values.values()))


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
PARTS = st.dictionaries(st.sampled_from(["term", "spoken", "id", ""]), PLAIN, max_size=3)
ANY_VALUE = PLAIN | PARTS | st.lists(PLAIN | PARTS, max_size=3)


@given(st.sampled_from([*CONFIG_CHECKS]), ANY_VALUE)
@settings(deadline=None)
def test_any_value_is_taken_or_refused_with_a_message(key, value):
    problems = []
    try:
        parse_config({key: value})
    except ConfigError as error:
        problems = error.problems

    assert all(re.match(rf"'{key}' (?:must|holds|entr)", problem) for problem in problems)


def config_file(folder, content):
    path = folder / "config.json"
    path.write_bytes(content)
    return path


def test_a_file_is_read(tmp_path):
    path = config_file(tmp_path, b'{"language": "German", "voice": "zzz"}')

    config, warnings = load_config(path)

    assert config.language == "German"
    assert len(warnings) == 1


def test_a_byte_order_mark_is_no_matter(tmp_path):
    assert load_config(config_file(tmp_path, b'\xef\xbb\xbf{"language": "German"}'))[0].language == "German"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not JSON: "),
        (b"{'model': 1}", "is not JSON: "),
        (b'{"model": "a",}', "is not JSON: "),
        (b"\xff\xff", "is not JSON: "),
        (b"[" * 100_000, "is not JSON: "),
        (b'{"idle_seconds": ' + b"9" * 5000 + b"}", "is not JSON: "),
        (b'{"idle_seconds": NaN}', "'idle_seconds' must be a whole number"),
        (b"[1]", "must be a JSON object"),
        (b'{"zzz": 1}', "unknown key 'zzz'"),
    ],
)
def test_a_bad_file_is_named_with_its_problem(tmp_path, content, problem):
    path = config_file(tmp_path, content)

    (found,) = problems_of(load_config, path)

    assert found.startswith(f"--config {path}: {problem}")


def test_a_file_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "config.json"

    assert problems_of(load_config, path) == [f"--config {path}: cannot be read: No such file or directory"]


def test_the_example_holds_every_key_at_its_default():
    example = json.loads((ROOT / "config.example.json").read_text())

    assert list(example) == list(CONFIG_CHECKS)
    assert parse_config(example) == (Config(), [])


# ---- secrets -----------------------------------------------------------------


def secret_file(folder, content, mode=0o600):
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("content", [KEY, KEY + "\n", KEY + "\r\n", f"  {KEY}\t\n\n", "!~" * 8])
def test_a_secret_is_read_without_its_line_end(tmp_path, content):
    assert read_secret(secret_file(tmp_path, content.encode()), "--key-file") == content.strip()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"short", "is too short for a secret; it needs 16 characters"),
        (b"k" * 15, "is too short for a secret; it needs 16 characters"),
        (b"k" * (SECRET_LIMIT + 1), "must hold one secret on one line and nothing else"),
        (f"{KEY}\n{KEY}".encode(), "must hold one secret on one line and nothing else"),
        (f"API_SERVER_KEY= {KEY}".encode(), "must hold one secret on one line and nothing else"),
        (b"k" * 20 + b"\x00", "must hold one secret on one line and nothing else"),
        (b"\xef\xbb\xbf" + b"k" * 20, "must hold one secret on one line and nothing else"),
        ("schlüssel-schlüssel".encode(), "must hold one secret on one line and nothing else"),
        (b"\xff" * 20, "must hold one secret on one line and nothing else"),
        ("k".encode("utf-16") * 20, "must hold one secret on one line and nothing else"),
    ],
)
def test_a_bad_secret_is_named_by_flag_and_file(tmp_path, content, problem):
    path = secret_file(tmp_path, content)

    assert problems_of(read_secret, path, "--key-file") == [f"--key-file {path}: {problem}"]


@as_anybody
@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o666])
def test_a_secret_that_everybody_can_read_is_refused(tmp_path, mode):
    path = secret_file(tmp_path, KEY.encode(), mode)

    assert problems_of(read_secret, path, "--key-file") == [
        f"--key-file {path}: every user can read it; run: chmod 600 {path}"
    ]


@as_anybody
@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_a_secret_for_the_owner_and_a_group_is_fine(tmp_path, mode):
    assert read_secret(secret_file(tmp_path, KEY.encode(), mode), "--key-file") == KEY


def test_a_secret_that_cannot_be_read_is_named(tmp_path):
    (problem,) = problems_of(read_secret, tmp_path / "none", "--key-file")

    assert problem == f"--key-file {tmp_path / 'none'}: cannot be read: No such file or directory"


def test_no_problem_quotes_a_secret(tmp_path):
    path = secret_file(tmp_path, b"hunter2 hunter2 hunter2")

    assert "hunter2" not in problems_of(read_secret, path, "--key-file")[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("KEY=abc", "abc"),
        ("KEY = abc ", "abc"),
        ("\tKEY\t=\tabc", "abc"),
        ("export KEY=abc", "abc"),
        ("KEY='a b'", "a b"),
        ('KEY="abc" # comment', "abc"),
        ('KEY="a#b"', "a#b"),
        ("KEY=abc # comment", "abc"),
        ("KEY=abc#def", "abc#def"),
        ("KEY=abc=", "abc="),
        ("KEY=abc\r\nOTHER=x\r\n", "abc"),
        ("KEY=old\nKEY=new", "new"),
        ("KEY=old\nKEY=", ""),
        ("KEY='half", "'half"),
        ("# KEY=abc", ""),
        ("MY_KEY=abc\nKEY_2=abc\nkey=abc", ""),
        ("", ""),
    ],
)
def test_a_value_is_found_in_every_form_of_dotenv(text, value):
    assert dotenv_value(text, "KEY") == value


def find(folder, path=None, variable="API_SERVER_KEY", **environ):
    return find_secret("hermes-key", path, variable, {"HOME": str(folder), **environ})


def hermes_home(folder, text, name=".hermes"):
    home = folder / name
    home.mkdir()
    (home / ".env").write_text(text)
    (home / ".env").chmod(0o600)
    return home


def test_a_flags_file_comes_first(tmp_path):
    hermes_home(tmp_path, f"API_SERVER_KEY={'e' * 16}")
    (tmp_path / "hermes-key").write_text("c" * 16)
    (tmp_path / "hermes-key").chmod(0o600)

    found = find(tmp_path, secret_file(tmp_path, KEY.encode()), CREDENTIALS_DIRECTORY=str(tmp_path))

    assert found == KEY


def test_then_comes_the_credential_of_systemd(tmp_path):
    hermes_home(tmp_path, f"API_SERVER_KEY={'e' * 16}")
    (tmp_path / "hermes-key").write_text("c" * 16)
    (tmp_path / "hermes-key").chmod(0o400)

    assert find(tmp_path, CREDENTIALS_DIRECTORY=str(tmp_path)) == "c" * 16


def test_then_comes_hermes_own_env(tmp_path):
    hermes_home(tmp_path, f"API_SERVER_KEY={KEY}\n")

    assert find(tmp_path) == KEY
    assert find(tmp_path, CREDENTIALS_DIRECTORY=str(tmp_path)) == KEY


def test_hermes_home_can_be_elsewhere(tmp_path):
    home = hermes_home(tmp_path, f"API_SERVER_KEY={KEY}\n", "elsewhere")

    assert find(tmp_path, HERMES_HOME=str(home)) == KEY


def test_the_access_token_is_never_looked_for_in_hermes_env(tmp_path):
    hermes_home(tmp_path, f"access-token={KEY}\n=x\n")

    assert find(tmp_path, variable="") == ""


@pytest.mark.parametrize("text", [None, "", "OTHER=x", "API_SERVER_KEY="])
def test_a_key_that_is_nowhere_names_the_flag_and_the_file(tmp_path, text):
    if text is not None:
        hermes_home(tmp_path, text)

    assert problems_of(find, tmp_path) == [
        f"--hermes-key-file: not given, and {tmp_path}/.hermes/.env holds no API_SERVER_KEY;"
        " name the key's file"
    ]


def test_a_bad_key_in_hermes_env_is_named(tmp_path):
    hermes_home(tmp_path, "API_SERVER_KEY=short")

    assert problems_of(find, tmp_path) == [
        f"{tmp_path}/.hermes/.env: API_SERVER_KEY is too short for a secret; it needs 16 characters"
    ]


def test_an_env_that_every_user_can_read_is_refused(tmp_path):
    path = hermes_home(tmp_path, f"API_SERVER_KEY={KEY}") / ".env"
    path.chmod(0o644)

    assert problems_of(find, tmp_path) == [
        f"API_SERVER_KEY of {path}: every user can read it; run: chmod 600 {path}"
    ]


def test_an_env_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / ".hermes" / ".env").mkdir(parents=True)

    (problem,) = problems_of(find, tmp_path)

    assert problem == f"{tmp_path}/.hermes/.env: cannot be read: Is a directory; give --hermes-key-file"


@given(st.text())
@settings(deadline=None)
def test_a_checked_secret_can_go_into_a_header(text):
    try:
        secret = checked_secret(text)
    except ValueError:
        return
    assert re.fullmatch(r"[!-~]{16,}", secret)


# ---- addresses ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8790", ("127.0.0.1", 8790)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("0.0.0.0", ("0.0.0.0", 8790)),
        (":8080", ("127.0.0.1", 8080)),
        ("", ("127.0.0.1", 8790)),
        ("localhost:0", ("localhost", 0)),
        ("voice.lan", ("voice.lan", 8790)),
        ("[::1]:8080", ("::1", 8080)),
        ("[::1]", ("::1", 8790)),
        ("::1", ("::1", 8790)),
        ("::", ("::", 8790)),
        ("[fe80::1%eth0]:8080", ("fe80::1%eth0", 8080)),
        ("2001:db8::2", ("2001:db8::2", 8790)),
    ],
)
def test_an_address_to_listen_on_has_many_forms(text, address):
    assert parse_listen(text) == address


@pytest.mark.parametrize(
    "text",
    ["8790", "host:", "host:port", "host:99999", "host:123456", "a:b:c", "[]:80", "[::1]8080", "http://a:80"],
)
def test_a_bad_address_gives_an_example(text):
    assert problems_of(parse_listen, text) == [
        f"--listen {text!r}: give HOST:PORT, such as 127.0.0.1:8790 or [::1]:8790"
    ]


@pytest.mark.parametrize(
    ("host", "address", "loopback"),
    [
        ("127.0.0.1", True, True),
        ("127.9.9.9", True, True),
        ("::1", True, True),
        ("localhost", False, True),
        ("0.0.0.0", True, False),
        ("::", True, False),
        ("192.168.1.2", True, False),
        ("fe80::1%eth0", True, False),
        ("localhost.example.org", False, False),
        ("127.0.0.1.example.org", False, False),
        ("", False, False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host, address, loopback):
    assert (is_address(host), is_loopback(host)) == (address, loopback)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8642", "https://hermes.lan", "http://[::1]:8642/", "https://a.org/base/v1"]
)
def test_good_urls_have_no_problem(url):
    assert check_url(url, "--hermes-url") == []


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "127.0.0.1:8642",
            "localhost",
            "ftp://a.org",
            "http://",
            "http://:80",
            "http://a:0",
            "http://a:x",
        ),
        *("http://a b:80", "http://a:80/v 1", "http://a\x7f", "http://a\u200b/"),
    ],
)
def test_a_bad_url_gives_an_example(url):
    assert check_url(url, "--hermes-url") == [
        f"--hermes-url {url!r}: give a URL such as http://127.0.0.1:8642"
    ]


@pytest.mark.parametrize("url", ["http://[::1", "http://a:99999", "http://]:80"])
def test_a_url_that_cannot_be_parsed_gives_an_example(url):
    assert len(check_url(url, "--hermes-url")) == 1


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@a.org", "http://hunter2@a.org", "http://a?hunter2", "http://a#hunter2"]
)
def test_a_url_holds_no_secrets(url):
    assert check_url(url, "--hermes-url") == [
        "--hermes-url: the URL must hold no user name, password, query or fragment"
    ]


def arguments(*argv):
    return parse_arguments(argv)


def test_every_problem_of_the_start_is_reported_at_once(tmp_path):
    args = arguments(
        *("--listen", "nowhere:x", "--hermes-url", "hermes", "--openai-base-url", "openai"),
        *("--openai-key-file", str(tmp_path / "none"), "--static", str(tmp_path / "none")),
        *("--config", str(tmp_path / "none"), "--access-token-file", str(tmp_path / "none")),
    )

    problems = problems_of(build_server, args, {"HOME": str(tmp_path)})

    flags = [re.match(r"--[a-z-]+", problem)[0] for problem in problems]
    assert flags == [
        *("--config", "--listen", "--hermes-url", "--openai-base-url", "--openai-key-file"),
        *("--hermes-key-file", "--access-token-file", "--static"),
    ]


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "voice.lan:0"])
def test_beyond_loopback_a_token_is_needed(tmp_path, listen):
    key = str(secret_file(tmp_path, KEY.encode()))
    args = arguments("--listen", listen, "--openai-key-file", key, "--hermes-key-file", key)

    assert problems_of(build_server, args, {"HOME": str(tmp_path)}) == [
        f"--listen {listen}: others could reach it, so it needs --access-token-file;"
        " whoever gets in drives Hermes"
    ]


def test_beyond_loopback_other_problems_do_not_hide_the_missing_token(tmp_path):
    args = arguments("--listen", "0.0.0.0:0")

    problems = problems_of(build_server, args, {"HOME": str(tmp_path)})

    assert len(problems) == 3
    assert "--access-token-file" in problems[-1]


def test_secrets_come_from_files_only():
    flags = vars(arguments())

    assert {flag for flag in flags if re.search("key|token|secret|password", flag)} == {
        *("openai_key_file", "hermes_key_file", "access_token_file", "tls_key")
    }


# ---- prompts -----------------------------------------------------------------

# The vendor's labels: the models are trained on them.
POLICIES = ("## Backchannel policy", "## Interruption policy", "## Delegation policy")
LISTS = ("Backend tools:", "Delegate to the backend when:", "Do not delegate to the backend when:")
LONGEST = Config(
    language="L" * 100,
    instructions="i" * INSTRUCTIONS_LIMIT,
    glossary=(Term("t" * TERM_LIMIT, "s" * TERM_LIMIT),) * GLOSSARY_LIMIT,
)
ALL_MODELS = [*MODELS, "gpt-live-9"]


@pytest.mark.parametrize("model", ALL_MODELS)
def test_the_persona_has_the_vendors_headings_and_lists_in_order(model):
    lines = persona(Config(model=model)).splitlines()

    found = [line for line in lines if line in POLICIES]
    labels = [label for line in lines for label in LISTS if line.startswith(label)]
    assert found == list(POLICIES)
    assert labels == list(LISTS)


def test_each_model_family_has_its_own_handoff():
    assert list(DELEGATION) == list(MODELS)
    for model in MODELS:
        assert all(words in persona(Config(model=model)) for words in DELEGATION[model].values())


def test_an_unknown_model_is_handled_like_the_newest():
    assert persona(Config(model="gpt-live-9")) == persona(Config(model=MODELS[-1]))


@pytest.mark.parametrize("text", [*map(persona, [Config(model=m) for m in MODELS]), backend_note(Config())])
def test_no_prompt_names_a_person(text):
    names = re.findall(r"(?<=[a-z,;] )[A-Z]\w+", text)

    assert set(names) <= {"Hermes", "Markdown"}


@pytest.mark.parametrize("model", ALL_MODELS)
def test_no_prompt_has_an_unfilled_place(model):
    config = Config(model=model)

    assert not re.search(r"[{}]|\n\n\n|\bNone\b", persona(config) + backend_note(config))


def test_the_glossary_is_in_both_prompts():
    config = Config(glossary=(Term("Nginx", "engine ex"), Term("Frigate")))

    for text in (persona(config), backend_note(config)):
        assert "- Nginx (may sound like: engine ex)\n- Frigate" in text


def test_without_a_glossary_neither_prompt_mentions_one():
    assert "hear" not in persona(Config()).rpartition("## ")[0].rpartition("Words you may")[1]
    assert "misheard:" not in backend_note(Config())


def test_the_language_is_in_both_prompts():
    config = Config(language="Plattdüütsch")

    assert "Speak Plattdüütsch" in persona(config)
    assert "speaks Plattdüütsch" in backend_note(config)


def test_extra_instructions_are_for_the_voice_and_last():
    config = Config(instructions="Call me {captain}.")

    assert persona(config).endswith("## Also\nCall me {captain}.")
    assert backend_note(config) == backend_note(Config())


def test_the_voice_is_told_to_leave_permission_to_the_user():
    approval = persona(Config()).partition("## Approval policy")[2]

    assert "Never\nanswer it yourself" in approval


def test_hermes_is_told_how_its_answer_is_used():
    assert re.search(r"no Markdown.*after a line\s+that holds only ---", BACKEND_NOTE, re.DOTALL)


@pytest.mark.parametrize("model", ALL_MODELS)
def test_the_longest_persona_fits_into_the_vendors_limit(model):
    config = Config(**{**vars(LONGEST), "model": model})

    # In English a token has four characters; two is the worst that is reckoned with.
    assert len(persona(config)) / 2 < 16_384
    assert len(backend_note(config)) / 2 < 16_384


def test_the_voices_are_names():
    assert len(set(VOICES)) == len(VOICES)
    assert all(re.fullmatch(r"[a-z]+", name) for name in VOICES)
    assert Config().voice in VOICES
