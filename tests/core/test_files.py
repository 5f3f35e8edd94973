"""Reading untrusted files: links are not followed, FIFOs do not block, and JSON is bounded."""

import os
from pathlib import Path

import pytest

from esper_telemetry.core import files
from esper_telemetry.core.files import open_own, open_regular, parse_json, read_json, replace_file, write_output


def test_a_link_is_opened_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")

    with pytest.raises(OSError, match="it is a symbolic link"):
        open_regular(tmp_path / "link", os.O_RDWR)
    os.close(open_regular(tmp_path / "link", os.O_RDONLY, follow_links=True))


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY])
def test_a_fifo_is_not_waited_for(flags: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        open_regular(tmp_path / "fifo", flags)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_in_the_place_of_an_own_file_is_removed(kind: str, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    own = tmp_path / "own"
    own.symlink_to("target") if kind == "link" else os.mkfifo(own)

    descriptor = open_own(own, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b"own")
    os.close(descriptor)

    assert (own.read_text(), own.is_symlink(), (tmp_path / "target").read_text()) == ("own", False, "kept")


def test_a_replaced_file_is_whole_and_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")

    replace_file(tmp_path / "link", "new")

    assert ((tmp_path / "link").read_text(), (tmp_path / "target").read_text()) == ("new", "kept")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "target"]


def test_output_goes_through_a_link_and_into_a_fifo(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)

    for name in ("link", "fifo"):
        write_output(tmp_path / name, "page")

    assert ((tmp_path / "link").is_symlink(), (tmp_path / "target").read_text()) == (True, "page")
    assert ((tmp_path / "fifo").is_fifo(), os.read(reader, 10)) == (True, b"page")
    os.close(reader)


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100 + "]" * 100, "{", "9" * 5000, b"\xff"])
def test_json_that_is_none_or_too_deep_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # Python's own messages are fine, too
        parse_json(text)


def test_a_small_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON_FILE_BYTES", 10)
    (tmp_path / "small.json").write_text('"\\u001bten"')
    (tmp_path / "large.json").write_text("[1, 2, 3, 4]")

    with pytest.raises(OSError, match="it is larger than"):
        read_json(tmp_path / "large.json")
