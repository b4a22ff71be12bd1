"""Our own exceptions in one tree, and exit statuses; a client is told by a `Failure` message.

SlipstreamError
├── ConfigError              the operator's settings cannot work: what, where, what to do
├── ModelError               a model folder is missing, broken or of an unsupported kind
├── FatalError               this process cannot go on; its supervisor starts it again
└── LinkError                a message between processes cannot be sent or read
    ├── MalformedMessage     it does not parse or contradicts itself
    ├── MessageTooLarge      it is over the receiver's size limit
    └── InboxTaken           another live process owns this inbox
"""

from __future__ import annotations

EXIT_FATAL = 1
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: to start it again would change nothing
EXIT_SIGNALLED = 128  # and the signal's number: a second signal cut the drain short


class SlipstreamError(Exception):
    """Root of every exception that Slipstream raises on purpose."""


class ConfigError(SlipstreamError):
    """Settings that cannot work; the text says what, where and what to do."""


class ModelError(SlipstreamError):
    """A model folder that is missing, broken or of a kind that is not supported."""


class FatalError(SlipstreamError):
    """Raised in a handler, it ends the process with status 1 (the device is lost)."""


class LinkError(SlipstreamError):
    """A message between processes cannot be sent or read."""


class MalformedMessage(LinkError):
    """A message that does not parse or contradicts itself; the text says what and where."""


class MessageTooLarge(LinkError):
    """A message over the size limit of the inbox that it is for."""


class InboxTaken(LinkError):
    """Another live process owns this inbox."""
