"""Which names, values and texts hold a secret, and which only look like it.

Keys of known forms are assembled from their prefix and `TAIL`, so that no scanner of repositories reports this file.
"""

import io
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from esper_telemetry import Telemetry, read_run
from esper_telemetry.alarms.metric_entries import metric_entries
from esper_telemetry.core import redaction
from esper_telemetry.core.redaction import MASKED_LOG, MaskedStream, known_secrets, masked, redacted, remember
from esper_telemetry.journal.lines import plain
from esper_telemetry.testing import FailingSink

TAIL = "Ab3dEf6hIj9kLmNoPq2s"
PREFIXES = "sk- sk-ant-api03- sk_live_ rk_test_ hf_ ghp_ gho_ ghs_ ghu_ github_pat_ glpat- gsk_ npm_ r8_ AIza ya29. GOCSPX- xoxb- wandb_v1_"
PREFIXES += (
    " dckr_pat_ SG. hvs. shpat_ lsv2_pt_ pcsk_ nvapi- xai- pplx- dop_v1_ lin_api_ glsa_ whsec_ ATATT3x sbp_ HRKU- tskey-auth- dp.pt."
)
PREFIXES += " GR1348941"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test start without the secrets of other tests, and leave none for the next."""
    monkeypatch.setattr(redaction, "_secrets", {})
    monkeypatch.setattr(redaction, "_known", ())
    redaction._masked_cached.cache_clear()
    yield
    redaction._masked_cached.cache_clear()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "abc") for name in ("api_key", "WANDB_API_KEY", "apiKey", "accessToken", "client-secret", "authorization")),
        *((name, "abc") for name in ("aws_secret_access_key", "secretkey", "wandb_key", "signing_key", "ssh_key", "token")),
        *((name, "abc") for name in ("hf_pat", "api_key_prod", "db_pass", "PGPASSWORD", "privateKey2", "hub_token")),
        *((name, "swordfish") for name in ("password", "passwords", "passwd", "passphrase", "db_password")),
        *((name, "swordfish") for name in ("conn_str", "connection_str", "db_passw", "pass_phrase", "userpw")),
        *((name, "hunter2") for name in ("wifi_psk", "webhook_hmac")),
        ("pin_code", 4711),
        *((name, "hunter2") for name in ("tokens", "auth", "pwd", "pass", "jwt", "webhook")),
        *(("password", value) for value in (12345678, "12345678", "/etc", "<abc>", "two words")),
        ("signature", "a+b/c3=="),
        ("observer_key", TAIL),
        ("pad_token", TAIL),
        ("password_hash", f"$2b$12${TAIL}"),
    ],
)
def test_secret_settings(name: str, value: Any) -> None:
    assert redacted({name: value}) == {name: "***"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "resnet50-v2") for name in ("keys", "author", "tokenizer", "passes", "monkey", "hotkey", "path", "secretary")),
        *((name, "obs_image_0") for name in ("key", "keys", "obs_key", "sort_key", "primary_key", "image_key", "bypass")),
        *((name, 4096) for name in ("tokens", "max_tokens", "num_tokens", "token_budget", "token", "api_key", "pin")),
        *((name, "4096") for name in ("tokens", "max_tokens", "num_tokens")),
        *((f"{kind}_token", value) for kind in ("eos", "pad", "image") for value in ("</s>", "<|im_end|>", "[PAD]", "eos", "###")),
        *(("token", value) for value in ("<eos>", "[SEP]", "", "none", "$HF_TOKEN", "${HF_TOKEN}", "****")),
        *(("auth", value) for value in ("none", "required", "oauth2", "service-account")),
        *((name, "sha256") for name in ("auth_mode", "token_type", "password_policy", "secret_name", "api_key_env")),
        *((name, "/home/me/.keys/a1") for name in ("token_file", "pwd", "ssh_key", "PWD", "api_key_path")),
        *(("password", value) for value in (None, True, 8, 0.5)),
        ("token_level_loss", "dapo2024"),
        *(("hmac", value) for value in ("sha256", True)),
        *((name, 4096) for name in ("hmac_steps", "psk", "conn_str")),
        *((name, "resnet50-v2") for name in ("connection", "spin_code", "passwise", "raw_str")),
        ("pat", "images/*.png"),
        ("api_key_id", "main"),
    ],
)
def test_innocent_settings(name: str, value: Any) -> None:
    assert redacted({name: value}) == {name: value}


@pytest.mark.parametrize("prefix", PREFIXES.split())
def test_keys_of_known_issuers(prefix: str) -> None:
    assert masked(f"refused {prefix}{TAIL}, sorry") == "refused ***, sorry"


@pytest.mark.parametrize(
    "key",
    [
        f"ASIA{TAIL[:16].upper()}",
        f"AKIA{TAIL[:16].upper()}",
        f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{TAIL}",
        f"123456789:AA{TAIL}{TAIL}",
        f"pat{TAIL[:14]}.{'0123456789abcdef' * 4}",
    ],
)
def test_keys_without_a_prefix_of_letters(key: str) -> None:
    assert masked(f"refused {key}") == "refused ***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("POST https://me:pw@host:5000/api failed", "POST https://me:***@host:5000/api failed"),
        ("https://me:p@ss@host", "https://me:***@host"),
        ("https://me:p/a?s#s@host", "https://me:***@host"),
        ("redis://:pw@host", "redis://:***@host"),
        ("http://a:p@h1,http://b:q@h2", "http://a:***@h1,http://b:***@h2"),
        (f"https://{TAIL}@host", "https://***@host"),
        (f"https://{TAIL}:x-oauth-basic@host", "https://***:***@host"),
        (f"https://{TAIL}:@host", "https://***:@host"),
        ("me:hunter2x@db.host:5432", "me:***@db.host:5432"),
        ("API_KEY=abc python train.py", "API_KEY=*** python train.py"),
        ("https://host/?token=abc&page=2", "https://host/?token=***&page=2"),
        ("AccountName=me;AccountKey=a+b/c==;Suffix=x", "AccountName=me;AccountKey=***;Suffix=x"),
        ("Server=h;User Id=sa;Password=a b;X=1", "Server=h;User Id=sa;Password=*** b;X=1"),
        ("--api-key abc --lr 3", "--api-key *** --lr 3"),
        ("Command '['mysql', '--password', 'abc']' failed", "Command '['mysql', '--password', '***']' failed"),
        ("Driver={SQL};Server=x;UID=sa;PWD=abc;", "Driver={SQL};Server=x;UID=sa;PWD=***;"),
        ("setx API_KEY abc /M", "setx API_KEY *** /M"),
        (f"wandb login --relogin {TAIL}", "wandb login --relogin ***"),
        ("curl -u me:abc host", "curl -u me:*** host"),
        ("mysqldump -h db -u me -phunter2 --port 3306 x", "mysqldump -h db -u me -p*** --port 3306 x"),
        ("mariadb -pabc -P3306", "mariadb -p*** -P3306"),
        ("redis-cli -h db -a abc ping", "redis-cli -h db -a *** ping"),
        ("sshpass -p abc ssh me@host", "sshpass -p *** ssh me@host"),
        ("mot_de_passe=abc contraseña=def", "mot_de_passe=*** contraseña=***"),
        (f"Authorization: Bearer {TAIL}", "Authorization: Bearer ***"),
        ("{'Authorization': 'token abc', 'x': 1}", "{'Authorization': '***', 'x': 1}"),
        ("Cookie: sid=abc; theme=dark", "Cookie: ***"),
        ("X-Auth-Token: a1b2c3", "X-Auth-Token: ***"),
        ("sort_key='api_key=abc'", "sort_key='api_key=***'"),
        ('{"api_key": "a\\"b", "n": 1}', '{"api_key": "***", "n": 1}'),
        ('{\\"api_key\\": \\"abc\\"}', '{\\"api_key\\": \\"***\\"}'),
        ("Namespace(passwords=['a', 'b'], n=1)", "Namespace(passwords=['***', '***'], n=1)"),
        ("b'password=abc'", "b'password=***'"),
        ("password: swordfish\nlr: 3", "password: ***\nlr: 3"),
        ("os.environ['API_KEY'] = 'abc'", "os.environ['API_KEY'] = '***'"),
        ("<password>abc</password>", "<password>***</password>"),
        (f"Incorrect API key provided: {TAIL}.", "Incorrect API key provided: ***."),
        (f"the key {TAIL} is not valid", "the key *** is not valid"),
        ("jdbc:oracle:thin:scott/abc@//db:1521/x", "jdbc:oracle:thin:scott/***@//db:1521/x"),
        ("GET /x sessionid=38afes7a", "GET /x sessionid=***"),
        ("for user 'sa' with password 'Passw0rd!'", "for user 'sa' with password '***'"),
        ("machine h login me password abc", "machine h login me password ***"),
        ("-----BEGIN PRIVATE KEY-----\nMI\n-----END PRIVATE KEY-----\n1", "-----BEGIN PRIVATE KEY-----***-----END PRIVATE KEY-----\n1"),
        ("https://hooks.slack.com/services/T1/B2/c3", "https://hooks.slack.com/services/***"),
    ],
)
def test_secrets_in_texts(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "since update 12 policy/kl is 0.3 (threshold 0.02): lower the learning rate, PPO(..., learning_rate=3e-4)",
        "eos_token=<eos> pad_token=tokenizer.eos_token max_tokens=512, token=12 of 40",
        "unexpected token: identifier at line 3",
        "password: must be at least eight characters",
        "http://host:5000/a@b, git@github.com:me/x, mailto:alice@host.org, ssh://git@host, https://alice@host",
        "key=policy/kl pwd=/some/path auth=oauth2 author=me keys=a1,b2",
        "cd /a;PWD=/some/path;ls, setx LR 0.0003, run wandb login, or wandb login --relogin",
        "commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b, run 3f2a9c11d0ab, 550e8400-e29b-41d4-a716-446655440000",
        "hf_transformers, sk-learn, scikit-learn-1.5.0, ASIA-Pacific, policy.token_embedding.weight",
        "the token 12 of group a3 is masked; the key policy/kl_first is not",
    ],
)
def test_innocent_texts(text: str) -> None:
    assert masked(text) == text


def test_the_catalogue_holds_nothing_that_looks_like_a_secret() -> None:
    texts = {entry.metric.key: asdict(entry.info()) for entry in metric_entries()}

    assert redacted(texts) == texts
    assert redacted(list(texts)) == list(texts)


def test_structures() -> None:
    settings = {
        "command": ["train.py", "--wandb-api-key", "abc", "-p", "8080", "-p", "hunter2", "--token=abc", "TOKEN=abc"],
        "store": {"api_key": ["x", 3], "url": "http://me:pw@host/a", "secret": None},
        "names": (f"hf_{TAIL}", "plain"),
        "auth": ("me", "hunter2"),
        "headers": [("X-Api-Key", "abc"), ("accept", "json")],
        "container": [{"name": "DB_PASSWORD", "value": "abc"}, {"name": "LR", "value": "3"}, {"key": "api_key", "value": "abc"}],
        f"gsk_{TAIL}": 1,
        f"gsk_{TAIL}2": 2,
        "1": "one",
        1: "number one",
    }

    assert redacted(settings) == {
        "command": ["train.py", "--wandb-api-key", "***", "-p", "8080", "-p", "***", "--token=***", "TOKEN=***"],
        "store": {"api_key": ["***", 3], "url": "http://me:***@host/a", "secret": None},
        "names": ("***", "plain"),
        "auth": ("me", "***"),
        "headers": [("X-Api-Key", "***"), ("accept", "json")],
        "container": [{"name": "DB_PASSWORD", "value": "***"}, {"name": "LR", "value": "3"}, {"key": "api_key", "value": "***"}],
        "***": 1,
        "****": 2,
        "1": "one",
        1: "number one",
    }


def test_fields_of_a_named_tuple_are_masked_by_their_names() -> None:
    class Login(NamedTuple):
        user: str
        password: str

    assert redacted(plain({"db": Login("me", "abc")})) == {"db": {"user": "me", "password": "***"}}


def test_a_secret_is_masked_wherever_it_appears_later_and_earlier() -> None:
    """In the note before its name, as bytes, in JSON, in an address, and line by line."""
    secret, key = "s3cr&t/ä", f"-----BEGIN PRIVATE KEY-----\nMIIE{TAIL}\n-----END PRIVATE KEY-----"

    shown = redacted({"note": f"log in with {secret}", "password": secret, "key": key})

    assert shown["note"] == "log in with ***"
    assert masked(f"{secret!r} {json.dumps(secret)} user=s3cr%26t/%C3%A4 user=s3cr%26t%2F%C3%A4") == "'***' \"***\" user=*** user=***"
    assert masked(f"line 2: MIIE{TAIL}") == "line 2: ***"


@pytest.mark.parametrize("value", ["a", "1", "cat", "123456", "learning_rate", "aaaaaa1", "0.0003", "/tmp/a1b2"])
def test_a_word_a_number_or_a_path_is_masked_only_beside_its_name(value: str) -> None:
    assert redacted({"password": value}) == {"password": "***"}
    assert known_secrets() == ()
    assert masked(f"with {value}.") == f"with {value}."


def test_a_short_secret_is_not_masked_inside_of_words() -> None:
    remember(["abc123"])

    assert masked("abc123 abc1234 run-abc123") == "*** abc1234 run-***"


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2")
    monkeypatch.setenv("SOME_DATABASE", "postgresql://me:pass2word@host/db")
    monkeypatch.setenv("SOME_TOKEN_FILE", "/run/token1")

    assert masked("hunter2 and pass2word, not /run/token1") == "*** and ***, not /run/token1"


def test_a_stream_masks_what_was_printed_in_pieces() -> None:
    output = io.StringIO()
    stream = MaskedStream(output)

    print("password=", "swordfish", sep="", file=stream)
    print("API_KEY=abc", end="", file=stream)
    stream.flush()

    assert output.getvalue() == "password=***\nAPI_KEY=***"


def test_a_log_is_masked_with_its_traceback() -> None:
    output = io.StringIO()
    logger = logging.Logger("some")
    logger.addHandler(logging.StreamHandler(output))
    logger.addFilter(MASKED_LOG)
    try:
        raise ValueError("api_key=abc")
    except ValueError:
        logger.warning("password=%s", "swordfish", exc_info=True)

    assert output.getvalue().startswith("password=***\nTraceback")
    assert output.getvalue().endswith("ValueError: api_key=***\n")


def test_time_grows_with_the_length_of_a_text_not_faster() -> None:
    """Each of these took minutes with a pattern whose look-ahead was unlimited."""
    pieces = "sk-", "a-", "://a:b/", "glpat-", "password='", "a.b:", "eyJ", "cookie: a=b;", "wandb login --a ", ";pwd=", "token=(", "x_key="
    for piece in pieces:
        masked(piece * 20_000)


@pytest.mark.system
def test_nothing_in_the_run_directory_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In settings, on the command line, in the error that a client raises in the other process, and in that process's log."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--sink", "mlflow:http://me:hunter2@host"])
    error = ConnectionError("cannot reach http://me:hunter2@host")
    sink = FailingSink(fail_in=["write"], error=error, in_process=False)
    config = {"wandb_api_key": "hunter2", "nested": {"password": "hunter2"}, "store": "http://me:hunter2@host"}

    with Telemetry([sink], run_dir=tmp_path / "run", config=config, close_timeout=12.0) as telemetry:
        telemetry.log({"my/number": 1.0})
        telemetry.flush(env_step=1)

    written = {file.name: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert {"journal.jsonl", "config.json", "status.json", "sinks.log"} <= written.keys()
    assert [name for name, content in written.items() if b"hunter2" in content] == []
    assert b"cannot reach" in written["sinks.log"]
    assert b"cannot reach" in written["status.json"]
    assert read_run(tmp_path / "run").info.config["store"] == "http://me:***@host"
