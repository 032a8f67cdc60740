"""Tables of numpy columns that grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from user_sys.codec import Array

FIRST_ROWS = 1024


class Table:
    """Columns of one length. Each is an attribute: a view of the rows there are, writable, replaced when rows come.

    Rows are appended in O(1) amortised: the arrays behind double. A view that somebody still holds keeps the rows that
    it had; it sees later changes of their values only until the arrays behind are next replaced.
    """

    DTYPES: ClassVar[Mapping[str, str]]

    def __init__(self) -> None:
        self._behind = {name: np.empty(0, dtype) for name, dtype in self.DTYPES.items()}
        self._rows = 0
        self._bind()

    def __len__(self) -> int:
        return self._rows

    @property
    def allocated_bytes(self) -> int:
        """Memory that the columns take, room to grow included."""
        return sum(column.nbytes for column in self._behind.values())

    def extend(self, rows: int, columns: Mapping[str, Array | int | bool]) -> range:
        """Appends `rows` rows and returns their numbers; `columns` names every column."""
        new = range(self._rows, self._rows + rows)
        if new.stop > len(next(iter(self._behind.values()))):
            self._grow(max(FIRST_ROWS, new.stop, 2 * self._rows))
        for name, behind in self._behind.items():
            behind[new.start : new.stop] = columns[name]
        self._rows = new.stop
        self._bind()
        return new

    def _grow(self, capacity: int) -> None:
        for name, behind in self._behind.items():
            grown = np.empty(capacity, behind.dtype)
            grown[: self._rows] = behind[: self._rows]
            self._behind[name] = grown

    def _bind(self) -> None:
        for name, behind in self._behind.items():
            setattr(self, name, behind[: self._rows])


class Names:
    """Strings and their codes, 0, 1, 2, ... in the order in which they came."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    def code(self, name: str) -> int:
        """The code of `name`, a new one if need be."""
        code = self._codes.setdefault(name, len(self.names))
        if code == len(self.names):
            self.names.append(name)
        return code

    def find(self, name: str) -> int:
        """The code of `name`; -1 where it never came."""
        return self._codes.get(name, -1)
