"""Who came to a port and has not said yet what it wants: few at once, and the newest may always come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Arrivals"]

T = TypeVar("T", bound=Hashable)


class Arrivals(Generic[T]):
    """A bounded number of those who came; whoever comes then takes the place of another one.

    That is the one that has waited longest of the host that most of them are from: somebody who opens
    connections and says nothing pushes out his own before those of others, and who says at once what he
    wants is gone from here before it is his turn. Not thread safe.

    Args:
        most: How many there may be.
        speaks: Whether it has sent something that nobody had the time to read yet: the last that has to go.
    """

    def __init__(self, most: int, speaks: Callable[[T], bool] = lambda _one: False) -> None:
        self._most = most
        self._speaks = speaks
        self._hosts: dict[T, str] = {}  # in the order in which they came
        self._of_host: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._hosts)

    def __contains__(self, one: T) -> bool:
        return one in self._hosts

    def add(self, one: T, host: str) -> T | None:
        """``one`` came from ``host``; who has to go for it, and is not among them any more."""
        self._hosts[one] = host
        self._of_host[host] += 1
        if len(self._hosts) <= self._most:
            return None
        largest = max(self._of_host.values())
        those = [other for other, of in self._hosts.items() if self._of_host[of] == largest and other != one]
        oldest = next((other for other in those if not self._speaks(other)), those[0] if those else one)
        self.remove(oldest)
        return oldest

    def remove(self, one: T) -> None:
        """It has said what it wants, or is gone; nothing if it was not among them."""
        host = self._hosts.pop(one, None)
        if host is not None:
            self._of_host[host] -= 1
            if not self._of_host[host]:
                del self._of_host[host]
