"""Base classes of objects that are used in a ``with`` statement."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self


class ClosedAtExit:
    """The end of the ``with`` statement closes the object."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Ends the object."""


class StartedAtEntry(ClosedAtExit):
    """The ``with`` statement starts the object, and its end closes it."""

    def __enter__(self) -> Self:
        self.start()
        return self

    @abstractmethod
    def start(self) -> None:
        """Starts the object."""
