"""What the exit status of a service says to whoever supervises it."""

from __future__ import annotations

EXIT_FATAL = 1
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: starting it again would change nothing
EXIT_SIGNALLED = 128  # and the signal's number: a second signal cut the drain short
