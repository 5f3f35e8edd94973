"""Masks secrets in all texts that are written, sent or printed: `masked` for a text, `redacted` for a structure.

Once the rules of `core/secret_rules.py` have recognised a secret, it is masked in every text of this process: an exception may contain
the key from a setting. Helper processes get these secrets through their pipes, never on a disk or a command line.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, Final, TextIO
from urllib.parse import quote, quote_plus, unquote

from esper_telemetry.core.interrupts import is_interrupt
from esper_telemetry.core.messages import printable
from esper_telemetry.core.secret_rules import NUMBER, SHAPE, Suspicion, hides, is_distinctive, is_mixed, is_random, suspicion

HIDDEN: Final = "***"
"""Replacement of a secret."""
MAX_SECRETS: Final = 1000
"""Maximum number of secrets, in all their forms, that a process remembers."""
MIN_CONTAINED_LENGTH: Final = 12
"""Shortest secret that is also masked inside longer words."""
ENVIRONMENT_SECONDS: Final = 1.0
"""Time between two checks of the environment variables, which a program may set at any time."""
MAX_CAUSES: Final = 5
"""Exceptions of a chain that are shown."""
MAX_ERROR_CHARACTERS: Final = 300
CACHED_TEXTS, MAX_CACHED_LENGTH = 4096, 400
"""Number and length of texts in the cache, because every update has the same names of layers."""

ADDRESS: Final = re.compile(
    r"""(?<=://)(?P<user>[^\s/:@?\#"'`<>]{0,200}):(?:(?P<password>[^\s/?\#"'`<>]{0,300})|"""
    r"""(?!\d+(?:[/?\#\s"',;)]|$))(?P<odd>(?:(?!://)[^\s"<>]){1,300}))@"""
)
"""User and password of an address: up to the last @ before the path, or before the next space if the password has a slash."""
WORD_IN_PROSE: Final = re.compile(r"[a-z]{1,12}[ ]+[A-Za-z]")

PLACES: Final[tuple[tuple[str, re.Pattern[str], Callable[[str], bool]], ...]] = (
    (
        "private key",
        re.compile(r"(?s)-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(.*?)(?:-----END [A-Z0-9 ]{0,40}-----|\Z)"),
        bool,
    ),
    ("hook", re.compile(r"(?:hooks\.slack\.com/\w+|discord(?:app)?\.com/api/webhooks|webhook\.office\.com/webhookb2)/([^\s\"'<>]+)"), bool),
    ("@", re.compile(r"""https?://([^\s/:@?\#"'`<>]{6,300})@"""), is_mixed),
    ("@", re.compile(r"""(?<![\w.:/@+-])[\w.+-]{1,64}:([^\s/:@?\#"'`<>]{6,300})@\w[\w-]{0,63}(?:\.[\w-]{1,64}){0,5}"""), is_mixed),
    (
        "authorization",
        re.compile(r"""(?i)\bauthorization\\?["']?\]?[ \t]*[:=][ \t]*\\?["']?(?:[a-z][a-z0-9-]{2,30}[ \t]+(?=\S))?([^\s"',\\]+)"""),
        bool,
    ),
    ("bearer", re.compile(r"(?i)\bbearer[ \t]+([\w.~+/=-]{8,})"), is_mixed),
    ("cookie", re.compile(r"""(?i)\b(?:set-)?cookie\\?["']?[ \t]*[:=][ \t]*\\?["']?((?:[\w.-]{1,80}=[^;\s"'\\()]*(?:;[ \t]*)?)+)"""), bool),
    ("-", re.compile(r"(?<![\w-])(?:-u|--(?:proxy-)?user)[ =]\s*[\"']?[^\s:\"']{1,80}:([^\s\"']+)"), bool),
    ("mysql", re.compile(r"\bmysql\w*[ \t][^\n|;]{0,200}?(?<![\w-])-p([^\s\"']+)"), bool),
    ("mariadb", re.compile(r"\bmariadb[\w-]*[ \t][^\n|;]{0,200}?(?<![\w-])-p([^\s\"']+)"), bool),
    ("redis", re.compile(r"\bredis-\w+[ \t][^\n|;]{0,200}?(?<![\w-])-a[ \t]+([^\s\"']+)"), bool),
    ("sshpass", re.compile(r"\bsshpass[ \t]+-p[ \t]*([^\s\"']+)"), bool),
    ("jdbc:", re.compile(r"\bjdbc:[\w:]{1,80}:[\w$]{1,80}/([^\s@]{1,200})@"), bool),
    ("wandb", re.compile(r"\bwandb[ \t]+login[ \t]+(?:--[\w-]{1,40}(?:=\S{1,200})?[ \t]+){0,5}([\w-]{16,})"), is_mixed),
    ("pwd", re.compile(r"""(?i)(?:^|[;"'])[ \t]*pwd=([^;\s"']{1,300})(?=[;"']|$)"""), partial(hides, Suspicion.ANY)),
    ("login", re.compile(r"\blogin[ \t]+\S{1,80}\s+(?:account\s+\S{1,80}\s+)?password[ \t]+(\S+)"), bool),
)
"""Places of secrets: a lower-case word that the text must contain, the place with the secret as its group, and a check of the secret."""

ASSIGNMENT: Final = re.compile(
    r"""(?<![\w.-])-{0,2}(?P<name>[A-Za-z_][\w.-]*+(?:[ ](?:key|token|password|secret)s?(?!\w))?)\\?["'`]?\]?"""
    r"[ \t]{0,8}(?P<sign>:=|=>|={1,2}|:)[ \t]{0,8}"
)
OPTION: Final = re.compile(r"""(?<![\w.-])--?(?P<name>[A-Za-z][\w-]*+)\\?["']?(?P<sign>,|[ \t])[ \t]{0,8}""")
SETX: Final = re.compile(r"\b(?i:setx)[ \t]{1,8}(?P<name>[A-Za-z_]\w*+)(?P<sign>[ \t])[ \t]{0,8}")
ELEMENT: Final = re.compile(r"<(?P<name>[A-Za-z][\w.-]{0,80}+)(?P<sign>>)")
SENTENCE: Final = re.compile(
    r"(?i)(?<![\w.-])(?P<name>(?:key|token|password|passphrase|secret|credential)s?)"
    r"(?P<sign>(?:[ ](?:is|was|of|value|provided|given|used):?){0,2}[ ])(?=\S)"
)
"""What comes before a value: `name=`, `--name `, `setx name `, `<name>`, `the key is `."""
VALUE: Final = re.compile(
    r"""(?s)[brfu]{0,2}(?P<quote>\\?["'`])(?P<quoted>(?:(?!(?P=quote))(?:\\.|.))*+)|"""
    r"""(?:[A-Za-z_][\w.]{0,80}+)?(?P<list>[\[({][^\])}]{0,2000}+)|(?P<bare>[^\s"'`,;&<>()\[\]{}|\\]{1,2000}+)"""
)
QUOTED: Final = re.compile(r"""(?s)(["'])(.*?)\1""")
LITERAL: Final = re.compile(r"""(?s)[brfu]{0,2}(["'])(.*)\1""")
OPTION_WORD: Final = re.compile("--?([A-Za-z][A-Za-z0-9_-]*)")
PLAIN: Final = frozenset((int, float, bool, type(None)))

_secrets: dict[str, None] = {}
_known: tuple[str, ...] = ()
_environment: tuple[float, int] = (float("-inf"), 0)


def masked(text: str) -> str:
    """Return the text with stars for its secrets, and remember them."""
    _look_at_environment()
    return _masked_text(text)


def redacted(value: Any) -> Any:
    """Return mappings, lists and texts with stars for their secrets, and remember them.

    Numbers are kept, except passwords. An item after an option in a list, and the second item of a pair, belong to the name before them. A
    secret that a later part names is masked in earlier parts too.
    """
    _look_at_environment()
    known = _known
    result = _redacted(value, Suspicion.NONE)
    return result if known is _known else _redacted(value, Suspicion.NONE)


def error_line(error: BaseException) -> str:
    """Return an exception as one printable line of at most `MAX_ERROR_CHARACTERS`, without secrets."""
    text = " ".join(error_text(error, 2 * MAX_ERROR_CHARACTERS).split())
    return _cut(f"{type(error).__name__}: {text}" if text else type(error).__name__, MAX_ERROR_CHARACTERS)


def error_text(error: BaseException, size: int) -> str:
    """Return the message of an exception without secrets: printable, at most `size` characters, empty if `str` raises."""
    try:
        text = str(error)
    except BaseException as raised:
        if is_interrupt(raised):
            raise
        text = ""
    # mask a longer text than is kept, so that a secret is not cut in two before it is masked
    return _cut(masked(printable(text[: 4 * size].encode("utf-8", "backslashreplace").decode())), size)


def error_trace(error: BaseException) -> str:
    """Return the traceback of an exception after the tracebacks of its causes; long messages are cut."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < MAX_CAUSES:
        parts.append(f"Traceback (most recent call last):\n{''.join(traceback.format_tb(cause.__traceback__))}{error_line(cause)}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return masked("\n\n".join(reversed(parts)))


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 3]}..."


def remember(values: Iterable[str]) -> None:
    """Mask these texts in every text from now on if they are distinctive, as `hunter2` and not `cat` or `1234`."""
    global _known
    before = len(_secrets)
    for value in values:
        literal = LITERAL.fullmatch(value)
        for line in re.split(r"\r?\n|\\n", literal[2] if literal else value):
            line = line.strip()
            if line not in _secrets and len(_secrets) < MAX_SECRETS and is_distinctive(line):
                encoded = quote(line), quote(line, safe=""), quote_plus(line), unquote(line)
                _secrets.update(dict.fromkeys((line, *encoded, repr(line)[1:-1], json.dumps(line)[1:-1])))
    if len(_secrets) > before:
        forms = list(_secrets)  # in one step, because other threads may add to it
        _known = tuple(sorted(forms, key=len, reverse=True))
        _masked_cached.cache_clear()
        _masked_names.cache_clear()


def known_secrets() -> tuple[str, ...]:
    """Return the secrets that this process has recognised, for its helpers; the same object until a new one is added."""
    _look_at_environment()
    return _known


def _look_at_environment() -> None:
    """Remember the secrets of environment variables."""
    global _environment
    looked_at, count = _environment
    now = time.monotonic()
    if now - looked_at < ENVIRONMENT_SECONDS and count == len(os.environ):
        return
    _environment = now, len(os.environ)
    for name, value in list(os.environ.items()):
        if (level := suspicion(name)) and hides(level, value):
            remember([value])
        else:
            _masked_cached(value)


def _redacted(value: Any, level: Suspicion) -> Any:
    """Return the value without secrets; `level` is the suspicion of its name."""
    if type(value) in PLAIN and level < Suspicion.CERTAIN:
        return value
    if level and hides(level, value):
        return _hidden(str(value))
    if isinstance(value, str):
        return _masked_text(value)
    if isinstance(value, dict | Mapping):
        return _redacted_mapping(value, level)
    if type(value) in (list, tuple):
        return type(value)(_redacted_items(value, level))
    return value


def _redacted_mapping(values: Mapping[Any, Any], level: Suspicion) -> dict[Any, Any]:
    """Return the mapping without secrets; in `{"name": N, "value": V}`, as in a container's settings, or with `key`, V belongs to N."""
    level = Suspicion.RANDOM if level is Suspicion.MIXED else level  # the values have names
    result: dict[Any, Any] = {}
    for (name, own), (original, value) in zip(_masked_names(tuple(map(str, values))), values.items(), strict=True):
        label = max(suspicion(str(values.get(each))) for each in ("name", "key")) if name == "value" else own
        result[name if isinstance(original, str) else original] = _redacted(value, max(level, own, label))
    return result


@lru_cache(CACHED_TEXTS)
def _masked_names(names: tuple[str, ...]) -> tuple[tuple[str, Suspicion], ...]:
    """Return each name without secrets, and its suspicion; names that become equal get more stars."""
    result: list[tuple[str, Suspicion]] = []
    used = set(names)
    for name in names:
        shown = _masked_text(name)
        while shown != name and shown in used:
            shown += "*"
        used.add(shown)
        result.append((shown, suspicion(name)))
    return tuple(result)


def _redacted_items(values: list[Any] | tuple[Any, ...], level: Suspicion) -> Iterator[Any]:
    if set(map(type, values)) <= PLAIN:
        yield from values
        return
    before = ""
    for value in values:
        own = level
        if isinstance(value, str):
            if (option := OPTION_WORD.fullmatch(before)) and not value.startswith("--"):
                own = max(level, _option_suspicion(option[1]))
                value = masked(f"-u {value}")[3:] if option[1] in ("u", "user") else value
            elif len(values) == 2 and before and not suspicion(value):  # a pair
                own = max(level, suspicion(before))
        yield _redacted(value, own)
        before = value if isinstance(value, str) else ""


def _hidden(secret: str) -> str:
    remember([secret, *(part.rpartition("=")[2] or part for part in re.split(r"[\s;]+", secret))])
    return HIDDEN


def _masked_text(text: str) -> str:
    text = str(text)  # a member of an enumeration is equal to its value, and would replace it in the cache
    return _masked(text) if len(text) > MAX_CACHED_LENGTH else _masked_cached(text)


def _masked(text: str) -> str:
    if "://" in text:
        text = ADDRESS.sub(_masked_address, text)
    lower = text.lower()
    for word, place, is_credible in PLACES:
        if word in lower:
            text = place.sub(lambda match, test=is_credible: _masked_group(match, test), text)  # type: ignore[misc]
    for signs, beginning, level_of in BEGINNINGS:
        if any(sign in text for sign in signs):
            text = _masked_values(beginning, text, level_of)
    text = SHAPE.sub(HIDDEN, text)
    for secret in _known:
        if secret in text:
            text = _word(secret).sub(HIDDEN, text) if len(secret) < MIN_CONTAINED_LENGTH else text.replace(secret, HIDDEN)
    return text


_masked_cached = lru_cache(CACHED_TEXTS)(_masked)


@lru_cache(MAX_SECRETS)
def _word(secret: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])")


def _masked_address(match: re.Match[str]) -> str:
    user, password = match["user"], match["password"] if match["odd"] is None else match["odd"]
    remember([unquote(password), password])
    is_token = is_random(user) or (not password and is_mixed(user))
    return f"{_hidden(user) if is_token else user}:{HIDDEN if password else ''}@"


def _masked_group(match: re.Match[str], is_credible: Callable[[str], bool]) -> str:
    if not is_credible(match[1]):
        return match[0]
    begin, end = match.start(1) - match.start(), match.end(1) - match.start()
    return f"{match[0][:begin]}{_hidden(match[1])}{match[0][end:]}"


def _masked_values(beginning: re.Pattern[str], text: str, level_of: Callable[[re.Match[str]], Suspicion]) -> str:
    """Return the text with stars for the secrets among the values after these beginnings."""
    parts, done = [], 0
    for match in beginning.finditer(text):
        level = level_of(match) if match.start() >= done else Suspicion.NONE
        value = VALUE.match(text, match.end()) if level else None
        if value is None:
            continue
        kind = value.lastgroup or ""
        begin, end = value.span(kind)
        if kind == "list":
            hidden = QUOTED.sub(lambda part, own=level: _masked_part(part, own), value["list"])
        else:
            content = value[kind].rstrip(".:!?") if kind == "bare" else value[kind]
            end = begin + len(content)
            is_secret = _is_bare_secret(match, content, level) if kind == "bare" else hides(level, content)
            hidden = _hidden(content) if is_secret else content
        if hidden != text[begin:end]:  # else it may contain names
            parts += [text[done:begin], hidden]
            done = end
    return "".join([*parts, text[done:]])


def _is_bare_secret(beginning: re.Match[str], value: str, level: Suspicion) -> bool:
    """Return whether a value without quotes is a secret: numbers, words of a sentence and a parser's tokens are not."""
    if NUMBER.fullmatch(value):
        return value.isdecimal() and hides(level, int(value))
    if beginning["sign"] == ":" and beginning["name"].lower().endswith("token"):
        level = min(level, Suspicion.MIXED)
    is_prose = beginning["sign"] in (":", " ") and WORD_IN_PROSE.match(beginning.string, beginning.end())
    return not is_prose and hides(level, value)


def _masked_part(part: re.Match[str], level: Suspicion) -> str:
    return f"{part[1]}{_hidden(part[2]) if hides(level, part[2]) else part[2]}{part[1]}"


def _option_suspicion(name: str) -> Suspicion:
    return Suspicion.MIXED if name == "p" else suspicion(name)


BEGINNINGS: Final[tuple[tuple[tuple[str, ...], re.Pattern[str], Callable[[re.Match[str]], Suspicion]], ...]] = (
    (("=", ":"), ASSIGNMENT, lambda match: suspicion(match["name"])),
    (("-",), OPTION, lambda match: _option_suspicion(match["name"])),
    (("setx ", "SETX "), SETX, lambda match: suspicion(match["name"])),
    (("<",), ELEMENT, lambda match: suspicion(match["name"])),
    ((" ",), SENTENCE, lambda match: Suspicion.MIXED if match["name"][0] in "pPsS" else Suspicion.RANDOM),
)


class MaskedStream:
    """A text stream that masks complete lines before it writes them to another stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        """Write the complete lines; a secret may be printed in pieces."""
        lines, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            self._stream.write(masked(lines) + newline)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Write the incomplete line."""
        line, self._line = self._line, ""
        self._stream.write(masked(line))
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class MaskedLog(logging.Filter):
    """Masks the messages and tracebacks of a logger."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask the record in place, and let it pass."""
        record.msg, record.args = masked(record.getMessage()), None
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = error_trace(record.exc_info[1])
        return True


MASKED_LOG: Final = MaskedLog()
logging.getLogger("esper_telemetry").addFilter(MASKED_LOG)
