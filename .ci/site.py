"""Hooks of MkDocs (mkdocs.yml): the start page is README.md; pages are made of SECURITY.md, --help and docstrings.

Links to files outside docs/ become plain text, because the site does not have these files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
INTERFACES = (  # what other packages implement or call
    "hal.robot",
    "hal.driver",
    "hal.spec",
    "hal.task",
    "hal.teleoperator",
    "hal.errors",
    "hal.conformance",
    "user_sys.policies.policy",
    "user_sys.policies.conformance",
    "user_sys.algorithms.algorithm",
    "user_sys.algorithms.conformance",
    "user_sys.rewards.reward",
    "user_sys.rewards.conformance",
    "user_sys.episode",
    "user_sys.store.store",
    "user_sys.replay.buffer",
    "user_sys.errors",
)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for name, source in (("index.md", "README.md"), ("security.md", "SECURITY.md")):
        text = (ROOT / source).read_text().replace("](docs/", "](").replace("](SECURITY.md", "](security.md")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "commands.md", content=commands_page()))
    listed = "\n".join(f"::: {module}" for module in INTERFACES)
    files.append(File.generated(config, "api.md", content=f"# Python interfaces\n\n{listed}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = Path(page.file.src_uri).parent

    def linked(found: re.Match[str]) -> str:
        file = files.get_file_from_path((here / found[2]).as_posix())
        return found[1] if file is None or file.inclusion.is_excluded() else found[0]

    return LINK.sub(linked, markdown)


def commands_page() -> str:
    from user_sys.commands.main import COMMAND

    parts = ["# Commands", "", "Each verb of `user-sys` with its options, as `--help` prints it."]
    for path, command in verbs(COMMAND, ("user-sys",)):
        context = click.Context(command, info_name=" ".join(path), max_content_width=100, terminal_width=100)
        parts += ["", f"## {' '.join(path[1:])}", "", "```text", command.get_help(context), "```"]
    return "\n".join(parts) + "\n"


def verbs(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from verbs(command, (*path, name))
        else:
            yield (*path, name), command
