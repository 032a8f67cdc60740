"""Lists the licences of the packages that the extras bring, and of the assets: the files in the wheel and in folders
named vendor that are no module. Exit status 1 if one is unknown or not allowed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("edge", "sim", "learner", "interchange", "backup", "cameras", "devices")
ALLOWED = re.compile(
    r"apache|mit|bsd|isc|python|psf|mpl|mozilla|zlib|unlicense|public domain|hpnd|cc0|0bsd|boost|ofl", re.IGNORECASE
)
COPYLEFT = re.compile(r"\b(a?gpl|gnu (?:affero )?general public)", re.IGNORECASE)
ROOT = Path(__file__).resolve().parents[2]
OWN = (
    ".css",
    ".html",
    ".js",
    ".svg",
    ".typed",
    ".xml",
)  # of own assets; not fonts, meshes or weights
OWNER = re.compile(r"copyright|©|licen[cs]e", re.IGNORECASE)
KNOWN = {  # of packages whose metadata has none, by their licence files
    "nvidia-ml-py": "BSD-3-Clause",
}
LINKED_ONLY = {"crc32c": "LGPL-2.1-or-later", "pygame": "LGPL-2.1"}  # used as libraries, not changed


def licence(package: Distribution) -> str:
    meta = package.metadata
    classifiers = [each.rpartition(" :: ")[2] for each in meta.get_all("Classifier", []) if each.startswith("License")]
    stated = meta.get("License-Expression") or "; ".join(classifiers) or (meta.get("License") or "").split("\n")[0]
    return str(stated or KNOWN.get(canonicalize_name(meta["Name"]), ""))


def closure() -> dict[str, Distribution]:
    """The installed packages that the project and `EXTRAS` require, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    roots = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    found: dict[str, Distribution] = {}
    waiting = [(each.name, tuple(sorted(each.extras))) for each in map(Requirement, roots)]
    seen = set[tuple[str, tuple[str, ...]]]()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            package = found[canonicalize_name(name)] = distribution(name)
        except PackageNotFoundError:
            continue  # not for this platform
        for text in package.requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                waiting.append((requirement.name, tuple(sorted(requirement.extras))))
    return found


def assets() -> dict[Path, str]:
    """The licence of each asset; empty if it is unknown.

    ``NAME.LICENSE`` beside an asset has its licence. Another asset is the project's own if it is text, is not in a
    folder named vendor, and names no owner.
    """
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = [path for package, globs in patterns.items() for each in globs for path in (ROOT / package).glob(each)]
    found = {*shipped, *ROOT.glob("tests/**/vendor/*")}
    return {p.relative_to(ROOT): asset_licence(p) for p in sorted(found) if p.is_file() and p.suffix != ".LICENSE"}


def asset_licence(path: Path) -> str:
    stated = path.with_name(f"{path.name.partition('.')[0]}.LICENSE")
    if stated.exists():
        return stated.read_text().splitlines()[0]
    if path.suffix in OWN and path.parent.name != "vendor" and not OWNER.search(path.read_text()):
        return "Apache-2.0"
    return ""


def main() -> int:
    packages = closure()
    wrong = []
    for path, stated in (files := assets()).items():
        print(f"{path}: {stated or 'unknown'}")
        if not ALLOWED.search(stated) or COPYLEFT.search(stated):
            wrong.append(f"{path} ({stated or 'unknown'})")
    for name, package in sorted(packages.items()):
        stated = LINKED_ONLY.get(name) or licence(package)
        print(f"{name} {package.version}: {stated or 'unknown'}")
        if name not in LINKED_ONLY and (not ALLOWED.search(stated) or COPYLEFT.search(stated)):
            wrong.append(f"{name} ({stated or 'unknown'})")
    if wrong:
        print(f"not allowed or unknown: {', '.join(wrong)}; look at their licence files, then edit {__file__}")
        return 1
    print(f"{len(packages)} packages and {len(files)} assets have licences that Apache-2.0 can ship beside")
    return 0


if __name__ == "__main__":
    sys.exit(main())
