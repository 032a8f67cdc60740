"""The code blocks of a page of the documentation."""

from __future__ import annotations

from pathlib import Path

from sybil import Document
from sybil.parsers.markdown import CodeBlockParser


def code_blocks(page: Path, language: str = "sh") -> list[str]:
    return [str(each.parsed) for each in Document.parse(str(page), CodeBlockParser(language, print)).examples()]
