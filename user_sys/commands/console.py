"""``user-sys console``: the console of a run, and the accounts of consoles that other computers can reach."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import click
from rich.table import Table

from user_sys.commands.options import PATH
from user_sys.commands.output import print_line, print_table
from user_sys.console.accounts import AccountStore, Role

_name = click.argument("name", metavar="NAME")


@click.command()
@click.argument("run", type=PATH, metavar="RUN")
@click.option("--port", type=int, help="to listen on; 0 takes a free one (default: the run's)")
def serve(run: Path, port: int | None) -> None:
    """Serve the console of the run in the folder RUN, which has `console.enabled: false`, until Ctrl-C."""
    from user_sys.run.console_process import serve_console  # imports FastAPI

    serve_console(run, port, lambda address: print_line(f"watch and take over: {address}"))


@click.command()
@_name
@click.option("--role", required=True, type=click.Choice(get_args(Role)), help="what the person may do")
@click.option("--password-stdin", is_flag=True, help="read the password from the first line of standard input")
def add(name: str, role: Role, password_stdin: bool) -> None:
    """Add an account, or replace it. A viewer watches and may press the e-stop; an operator drives and labels too; an
    admin also takes robots out of use.
    """
    password = (
        sys.stdin.readline().rstrip("\n")
        if password_stdin
        else click.prompt("Password", hide_input=True, confirmation_prompt=True)
    )
    AccountStore().add(name, role, password)
    print_line(f"{name} may sign in as {role}")


@click.command()
@_name
def remove(name: str) -> None:
    """Remove an account; its sign-ins end."""
    AccountStore().remove(name)
    print_line(f"{name} is removed")


@click.command(name="list")
def list_() -> None:
    """List the accounts."""
    table = Table("name", "role", box=None)
    for account in AccountStore().accounts().values():
        table.add_row(account.name, account.role)
    print_table(table)
