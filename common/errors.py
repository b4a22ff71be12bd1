"""Our own exceptions, in one tree; what travels to a client is a `Failure` message instead.

SlipstreamError
├── ConfigError              the operator's settings cannot work: what, where, what to do
├── ModelError               a model folder is missing, broken or of an unknown kind
├── FatalError               this process cannot go on; its supervisor starts it anew
└── LinkError                something about mail between processes
    ├── MalformedMessage     mail that does not parse or contradicts itself
    ├── MessageTooLarge      mail over the receiver's size limit
    └── InboxTaken           another live process owns this inbox
"""

from __future__ import annotations

EXIT_FATAL = 1
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: starting it again would change nothing
EXIT_SIGNALLED = 128  # and the signal's number: a second signal cut the drain short


class SlipstreamError(Exception):
    """Root of every exception that Slipstream raises on purpose."""


class ConfigError(SlipstreamError):
    """Settings that cannot work; the text says what, where and what to do."""


class ModelError(SlipstreamError):
    """A model folder that is missing, broken or of a kind that is not supported."""


class FatalError(SlipstreamError):
    """This process cannot go on (a lost device): raised in a handler, it ends it with status 1."""


class LinkError(SlipstreamError):
    """Something about mail between processes."""


class MalformedMessage(LinkError):
    """Mail that does not parse or contradicts itself; the text says what and where."""


class MessageTooLarge(LinkError):
    """Mail over the size limit of the inbox that it is for."""


class InboxTaken(LinkError):
    """Another live process owns this inbox."""
