"""Secrets in settings, addresses and messages, before any of it is written down or sent."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

PASSWORD = re.compile(r"(?<=://)([^/:@\s]*):([^/@\s]+)@")
MASKED = ":***@"
"""Stands in an address that holds a password."""
HIDDEN = "***"
"""Stands for a setting that is not shown."""

SECRET_WORDS = frozenset(
    [
        *("password", "passwd", "passphrase", "secret", "secrets", "token", "apikey", "bearer"),
        *("credential", "credentials", "authorization", "cookie"),
    ]
)
SECRET_PAIRS = frozenset([("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("auth", "key")])
"""Words, and words in a row, in the name of a setting whose text is nobody's business."""
KEY_SHAPES = re.compile(r"\b(?:sk-|hf_|ghp_|gho_|github_pat_|xox[abp]-|AKIA|wandb_v1_)[A-Za-z0-9_-]{16,}")
"""Keys that give themselves away by how they begin, wherever they stand."""
WORDS = re.compile("[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")


def masked(text: str) -> str:
    """The text with passwords in addresses, and keys that give themselves away, replaced by stars."""
    return KEY_SHAPES.sub(HIDDEN, PASSWORD.sub(rf"\1{MASKED}", text))


def redacted(settings: Any, *, show: Collection[str] = ()) -> Any:
    """Settings whose texts hold no secret: those under a name like `api_key` or `token` are stars, others are `masked`.

    Numbers and switches stay, so `max_tokens=512` does. Mappings, lists and tuples are gone through.

    Args:
        settings: any value.
        show: names that are shown all the same.
    """
    if isinstance(settings, str):
        return masked(settings)
    if isinstance(settings, Mapping):
        return {
            name: _hidden(value) if is_secret(str(name)) and name not in show else redacted(value, show=show)
            for name, value in settings.items()
        }
    if isinstance(settings, list | tuple) and type(settings) in (list, tuple):
        return type(settings)(redacted(value, show=show) for value in settings)
    return settings


def is_secret(name: str) -> bool:
    """Whether a setting of that name is likely to hold a secret: `wandb_api_key`, `accessToken`."""
    words = [word.lower() for word in WORDS.findall(name)]
    return not SECRET_WORDS.isdisjoint(words) or not SECRET_PAIRS.isdisjoint(pairwise(words))


def _hidden(value: Any) -> Any:
    """Stars for a text, and for every text within."""
    if isinstance(value, str | bytes):
        return HIDDEN if value else value
    if isinstance(value, Mapping):
        return {name: _hidden(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else HIDDEN
