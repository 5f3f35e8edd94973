"""No secret in what is written down or sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper_telemetry import Telemetry, read_run
from esper_telemetry.core.messages import is_secret, masked, redacted
from esper_telemetry.testing import FailingSink


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "WANDB_API_KEY",
        "apiKey",
        "accessToken",
        "db_password",
        "client-secret",
        "aws_secret_access_key",
        "authorization",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["keys", "key_size", "author", "tokenizer", "passes", "monkey", "hotkey", "path", "secretary"]
)
def test_names_that_only_look_like_it(name: str) -> None:
    assert not is_secret(name)


def test_only_texts_are_hidden_and_names_may_be_shown() -> None:
    settings = {
        "learning_rate": 3e-4,
        "max_token": 512,
        "token": "abc",
        "store": {"api_key": ["x", 3], "url": "http://me:pw@host/a", "secret": None},
        "names": ("hf_abcdefghijklmnopqrstuvwx", "plain"),
    }

    assert redacted(settings) == {
        "learning_rate": 3e-4,
        "max_token": 512,
        "token": "***",
        "store": {"api_key": ["***", 3], "url": "http://me:***@host/a", "secret": None},
        "names": ("***", "plain"),
    }
    assert redacted(settings, show=["token"])["token"] == "abc"


def test_addresses_in_messages() -> None:
    assert masked("POST https://me:pw@host:5000/api failed") == "POST https://me:***@host:5000/api failed"


def test_nothing_in_the_run_directory_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the settings, on the command line, in what a client raises in the other process, and in its log."""
    monkeypatch.setattr("sys.argv", ["train.py", "--sink", "mlflow:http://me:hunter2@host"])
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
