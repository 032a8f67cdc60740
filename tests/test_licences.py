"""Licences of the assets that the wheel ships; `make release-check` adds those of packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.licences import ALLOWED, asset_licence, assets


def test_each_asset_has_a_licence_that_apache_can_ship_beside() -> None:
    assert [path for path, licence in assets().items() if not ALLOWED.search(licence)] == []


@pytest.mark.parametrize(
    ("name", "content"),
    [("vendor/plot.min.js", "let a"), ("static/plot.js", "/* Copyright 2020 Ann */"), ("static/font.woff2", "wOF2")],
)
def test_asset_of_others_needs_its_licence_beside_it(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(content)
    assert asset_licence(path) == ""
    path.with_name(f"{path.name.partition('.')[0]}.LICENSE").write_text("The MIT License (MIT)\n\nCopyright Ann\n")
    assert asset_licence(path) == "The MIT License (MIT)"
