"""Our own exceptions in one tree, and exit statuses; a client gets a `Failure` message instead.

SlipstreamError              every exception that Slipstream raises on purpose
├── ConfigError              the operator's settings cannot work: what, where, what to do
├── ModelError               a model folder is missing, broken or of an unsupported kind
├── FatalError               ends the process with status 1; its supervisor starts it again
└── LinkError                a message between processes cannot be sent or read
    ├── MalformedMessage     it does not parse or contradicts itself: what and where
    ├── MessageTooLarge      it is over the receiver's size limit
    └── InboxTaken           another live process owns this inbox
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_FATAL = 1
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: to start it again would change nothing
EXIT_SIGNALLED = 128  # and the signal's number: a second signal cut the drain short


class SlipstreamError(Exception): ...


class ConfigError(SlipstreamError): ...


class ModelError(SlipstreamError): ...


class FatalError(SlipstreamError): ...


class LinkError(SlipstreamError): ...


class MalformedMessage(LinkError): ...


class MessageTooLarge(LinkError): ...


class InboxTaken(LinkError): ...


def near(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to a complaint, empty where nothing is alike."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""
