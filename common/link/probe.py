"""Whether a process listens at an endpoint, by the word of the kernels: the process need not turn.

So a worker in a long step is told from one that has died, or whose host is cut off.
"""

from __future__ import annotations

import errno
import select
import socket

from common.link.resolve import tcp_place

ANSWER_S = 1.0  # a host answers within milliseconds; after a second the kernel asks a second time
ENDED = "its process has ended"
_REFUSED = (errno.ECONNREFUSED, errno.ENOENT)
_UNREACHABLE = (
    *(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN),
)


class Probe:
    """A connection that is begun, looked at and closed; nothing here waits."""

    def __init__(self, endpoint: str, now_s: float) -> None:
        place = tcp_place(endpoint)
        address: tuple[str, int] | str = endpoint.removeprefix("ipc://")
        family = socket.AF_UNIX
        if place is not None:
            address = (place.host, int(place.port))
            family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        self._began_s = now_s
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._errno = self._socket.connect_ex(address)

    def why_gone(self, now_s: float) -> str | None:
        """Say why nobody is there: empty if somebody is, None as long as that is not known."""
        if self._errno == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if poll.poll(0):
                self._errno = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            elif now_s - self._began_s < ANSWER_S:
                return None
            else:
                self._errno = errno.ETIMEDOUT
        if self._errno in _REFUSED:
            return ENDED
        return "its host does not answer" if self._errno in _UNREACHABLE else ""

    def close(self) -> None:
        self._socket.close()
