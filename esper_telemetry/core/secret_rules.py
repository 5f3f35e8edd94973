"""Rules that recognise secrets: names of settings, values, places in a text, and the forms of known issuers.

A name alone does not decide, because trainers of language models have `max_tokens`, `pad_token` and `tokens`. A random value alone does not
decide either, because run ids, hashes and checksums are random.

The forms follow the rules of gitleaks. `detect-secrets` (1.5.0, of 2024) is not used: it reports a secret without its position in the line,
takes 0.4 ms a line and 80 ms to import, depends on requests and PyYAML, and lacks the keys of W&B, Hugging Face, Groq, Replicate, Google
and Anthropic.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache
from typing import Final

MIN_DISTINCTIVE_LENGTH: Final = 6
MIN_DIFFERENT_CHARACTERS: Final = 5
MIN_LETTERS: Final = 16
"""Minimum length of a distinctive text, its number of different characters, and its letters if it has neither digits nor signs."""
MIN_MIXED_LENGTH: Final = 5
"""Minimum length of a secret under a name of suspicion `MIXED`."""
MIN_CASE_CHANGES: Final = 3
"""Changes from lower to upper case: more than in a name such as `CosineAnnealing`."""
MIN_CHANGES: Final = 2
"""Changes between letters and digits in a piece of random text."""
MIN_CODE: Final = 1000
"""Smallest number that may be a password."""
CACHED_NAMES: Final = 4096


class Suspicion(IntEnum):
    """Degree to which a name suggests a secret, and the form that its value must have to be one."""

    NONE = 0
    RANDOM = 1
    """`obs_key`, `eos_token`, `password_hash`: a value that only a program writes."""
    MIXED = 2
    """`tokens`, `auth`, `pwd`: a value of letters with digits or signs."""
    ANY = 3
    """`api_key`, `token`: any text except paths and special tokens such as `<eos>`."""
    CERTAIN = 4
    """`password`: any text, and numbers."""


OWNERS: Final = (
    "anthropic|aws|azure|cohere|comet|datadog|dd|deepseek|gcp|gemini|github|gitlab|google|groq|hf|huggingface|langsmith|mistral|mlflow|neptune|"
    "nvidia|openai|pinecone|replicate|sendgrid|sentry|slack|stripe|twilio|wandb|access|account|api|auth|client|consumer|decryption|deploy|"
    "encryption|hmac|jwt|license|master|private|shared|signing|ssh|storage|subscription"
)
SURE_NAME: Final = re.compile(
    rf"secrets?_|(?:secret|{OWNERS})_?(?:key|token|pat|pass|auth|pwd)s?_|_(?:credential|cred|cookie)s?_|_(?:authorization|bearer|pw|mfa|otp)_|"
    r"_(?:db|database|smtp|ftp|redis|rediscli|mysql|pg|user|my|admin|root)_?(?:pass|auth|pwd)_|_(?:user|admin|root)_?pw_|_conn(?:ection)?_str(?:ing)?_|token_$"
)
LIKELY_NAME: Final = re.compile("_(?:tokens|auth|pwd|pass|pat|jwt|pin|psk|hmac|sig|signature|sas|webhook|sessionid|jsessionid|phpsessid)_$")
KEY_NAME: Final = re.compile("keys?_$")
LANGUAGE_MODEL_NAME: Final = re.compile(
    "_(?:eos|bos|pad|unk|sep|cls|mask|stop|start|end|special|image|video|audio|first|next|last|max|min|num|n|new|prompt|completion|output|input|"
    "generated|response|added|extra|decoder|vocab|begin|think|tool|separator|padding|truncation|per|total|reward|value)_tokens?_$"
)
QUALIFIER: Final = re.compile(
    "(?<!_conn)(?<!_connection)_(?:prod|production|dev|test|staging|value|str|text|raw|old|new|current|main|primary|secondary|backup|b64|base64|plain|plaintext|hex|pem)_$"
)
NAME_ABOUT_A_SECRET: Final = re.compile(
    "_(?:file|path|dir|directory|folder|name|id|ids|env|var|variable|size|len|length|count|num|number|type|kind|mode|method|policy|ttl|expiry|"
    "expires|expiration|timeout|limit|budget|required|enabled|url|uri|host|hint|prompt|field|header|format|manager|provider|source|class|fn|"
    "scope|scopes|loss|level|prefix|suffix|index|usage|rate|hash|algorithm|attempts|rotation|strength|rules|valid|changed|set)_$"
)
PASSWORD_NAME: Final = re.compile(
    "(?:pass(?:word|wd?|_?phrase|code|wort)s?|_pin_?code|kennwort|mots?_de_passe|contrasena|contrase_a|senha|parola|haslo|wachtwoord)_"
)
"""These patterns search in the words of a name, written as `_api_key_`."""
WORDS: Final = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
DIRECTORY_VARIABLES: Final = ("PWD", "OLDPWD")

PLACEHOLDER: Final = re.compile(
    r"(?i)\s*|[*•.…]+|x{4,}|bearer|basic|digest|none|null|nil|true|false|yes|no|auto|default|required|optional|unset|empty|missing|invalid|expired|"
    r"\$\w+|\$?\{[^}]*\}|%\w+%|\{\{.*\}\}|[<\[](?:redacted|hidden|masked|secret|password|token|api[ _-]?key|your[^>\]]*)[>\]]"
)
SPECIAL_TOKEN: Final = re.compile(r"<.*>|\[[A-Z_0-9]+\]", re.DOTALL)
NUMBER: Final = re.compile(r"[-+]?[\d.,_]+(?:[eE][-+]?\d+)?%?")
PATH: Final = re.compile(r"(?:~|\.{0,2})/[^\s=]*|[A-Za-z]:\\.*|(?:file|sqlite):.*|[^\s=]*\*[\w.]+")
VERSION: Final = re.compile(
    r"(?i)(?:v|oauth|openid|sha|md|tls|ssl|hmac|hs|rs|es|ed|rsa|aes|ntlm|utf|fp|bf|gpt|layer|step|word|top|camera|cam|gpu|cuda)[-_.:]?\d[\d._-]*[a-z]{0,3}"
)
"""A common word with a number, not a secret: `oauth2`, `sha256`, `layer_12`."""
UUID: Final = re.compile("(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SEPARATORS: Final = re.compile(r"[\s_\-./:,;]+")
CASE_CHANGE: Final = re.compile("[a-z][A-Z]")
CHANGE: Final = re.compile(r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])")
LONG_PIECE: Final = re.compile("[A-Za-z0-9]{12,}")

SHAPE: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:hf_|api_org_|gh[oprsu]_|gsk_|npm_|r8_|dckr_pat_|rubygems_|rdme_|pul-|figd_|ntn_|sbp_|ATATT3|HRKU-|tskey-[a-z]{3,9}-|dp\.pt\.|GR1348941|lin_api_|shp(?:at|ca|pa|ss)_|nvapi-|xai-|pplx-|tvly-|"
    r"dapi|do[opr]_v1_|sntryu_|LTAI|EAAA|PMAK-|NRAK-|sha256~)[A-Za-z0-9_~-]{16,}|"
    r"(?:[rs]k_(?:live|test|prod)_|whsec_|github_pat_|wandb_v1_|AIza|ya29\.|GOCSPX-|SG\.|xkeysib-|sntrys_|hv[sb]\.|sq0[a-z]{3}-|tfp_|lsv2_[ps][kt]_|"
    r"pcsk_|glsa_|pypi-Ag|sk-(?=[\w-]{0,60}\d)|gl[a-z]{2,5}-(?=[\w-]{0,60}\d)|key-(?=[a-z]{0,20}\d)|tk-us-|pscale_(?:tkn|pw|oauth)_)[\w.=-]{12,}|"
    r"xox[abeoprs]-[\w-]{8,}|xapp-\d-[\w-]{8,}|(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|"
    r"eyJ[\w-]{14,}={0,2}(?:\.[\w-]*){0,2}|AGE-SECRET-KEY-1[A-Z0-9]{16,}|\d{8,10}:AA[\w-]{30,}|"
    r"pat[A-Za-z0-9]{14}\.[0-9a-f]{32,}|"
    r"[\w~.]{3}\dQ~[\w~.-]{31,34}"
    r")"
)
"""Forms in which issuers write their keys."""


def hides(level: Suspicion, value: object) -> bool:
    """Return whether the value of a setting is a secret, given the suspicion of its name."""
    if not isinstance(value, str):
        is_code = isinstance(value, int) and not isinstance(value, bool) and abs(value) >= MIN_CODE
        return is_code and level is Suspicion.CERTAIN
    text = value.strip()
    if level is Suspicion.NONE or PLACEHOLDER.fullmatch(text):
        return False
    if level is Suspicion.CERTAIN or is_random(text):
        return True
    if level is Suspicion.RANDOM or SPECIAL_TOKEN.fullmatch(text) or PATH.fullmatch(text):
        return False
    return level is Suspicion.ANY or (" " not in text and is_mixed(text))


@lru_cache(CACHED_NAMES)
def suspicion(name: str) -> Suspicion:
    """Return how much the name of a setting suggests a secret."""
    if name in DIRECTORY_VARIABLES:
        return Suspicion.NONE
    words = QUALIFIER.sub("_", f"_{'_'.join(WORDS.findall(name)).lower()}_")
    is_password = PASSWORD_NAME.search(words) is not None
    is_sure = is_password or SURE_NAME.search(words) is not None
    if NAME_ABOUT_A_SECRET.search(words):
        return Suspicion.RANDOM if is_sure else Suspicion.NONE
    if LANGUAGE_MODEL_NAME.search(words):
        return Suspicion.RANDOM
    if is_sure:
        return Suspicion.CERTAIN if is_password else Suspicion.ANY
    if LIKELY_NAME.search(words):
        return Suspicion.MIXED
    return Suspicion.RANDOM if KEY_NAME.search(words) else Suspicion.NONE


def is_mixed(value: str) -> bool:
    """Return whether a text has letters with digits or signs, or more inner capitals than words have."""
    if len(value) < MIN_MIXED_LENGTH or VERSION.fullmatch(value):
        return False
    core = SEPARATORS.sub("", value)
    letters = sum(map(str.isalpha, core))
    return letters > 0 and (letters < len(core) or len(CASE_CHANGE.findall(value)) >= MIN_CASE_CHANGES)


def is_random(value: str) -> bool:
    """Return whether such a value can only come from a program: letters and digits alternate in a long piece of it."""
    pieces = LONG_PIECE.findall(value)
    return UUID.fullmatch(value) is not None or any(len(CHANGE.findall(piece)) >= MIN_CHANGES for piece in pieces)


def is_distinctive(value: str) -> bool:
    """Return whether a text differs so much from words, numbers and paths that it may be masked everywhere."""
    if len(value) < MIN_DISTINCTIVE_LENGTH or len(set(value)) < MIN_DIFFERENT_CHARACTERS:
        return False
    if any(rule.fullmatch(value) for rule in (PATH, NUMBER, PLACEHOLDER)) and not is_random(value):
        return False
    return is_mixed(value) or (len(value) >= MIN_LETTERS and (" " in value or not SEPARATORS.search(value)))
