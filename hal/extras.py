"""How somebody comes by what a driver or a verb needs and this package does not bring by itself."""

from __future__ import annotations


def with_extra(extra: str) -> str:
    """The command, in words. The package is on no index, where its name may be anybody's: it is a checkout or a wheel's
    file.
    """
    return f"pip install '.[{extra}]' in a checkout, or with the wheel's name before [{extra}] (docs/deployment.md)"
