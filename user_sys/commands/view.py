"""``user-sys view``: a stored episode, or a robot of a run, in another viewer on this computer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import click

from hal.signals import stop_on_signals
from user_sys.commands.options import PATH
from user_sys.commands.output import print_line
from user_sys.errors import DataSetError
from user_sys.interchange.viewers import FOXGLOVE_PORT, Viewer, foxglove_viewer, rerun_viewer, show_episode

Kind = Literal["rerun", "foxglove"]
PAUSE_S = 1.0  # between repetitions


@click.command()
@click.argument("path", type=PATH, metavar="PATH")
@click.option("--episode", metavar="ID", help="of the run or store PATH (default: its newest)")
@click.option("--robot", metavar="NAME", help="show this robot of the run PATH live instead")
@click.option("--rerun", "kind", flag_value="rerun", help="open a Rerun viewer")
@click.option("--foxglove", "kind", flag_value="foxglove", help="serve Foxglove's WebSocket, until Ctrl-C")
@click.option("--save", type=PATH, metavar="FILE.rrd", help="with --rerun: write this file instead")
@click.option("--port", type=click.IntRange(0, 65535), default=FOXGLOVE_PORT, help="with --foxglove (default: 8765)")
@click.option("--user", metavar="NAME", help="with --robot: your account, if people sign in to the run's console")
@click.option("--password-stdin", is_flag=True, help="with --user: read the password from standard input")
def view(
    path: Path,
    episode: str | None,
    robot: str | None,
    kind: Kind | None,
    save: Path | None,
    port: int,
    user: str | None,
    password_stdin: bool,
) -> None:
    """Show a stored episode or a live robot in Rerun or Foxglove on this computer. Nobody can drive by it."""
    if kind is None or (episode and robot) or (save and kind != "rerun"):
        raise click.UsageError("name --rerun or --foxglove, and --episode or --robot; --save belongs to --rerun")
    repeats = kind == "foxglove"
    show = _live(path, robot, user, password_stdin) if robot else stored_player(path, episode, repeats)
    stop = threading.Event()
    with ExitStack() as stack:
        if kind == "rerun":
            viewer = stack.enter_context(rerun_viewer("user-sys", save))
        else:
            viewer, address = stack.enter_context(foxglove_viewer("user-sys", port))
            print_line(f"open a connection to {address} in Foxglove; Ctrl-C ends it", error=True)
        if robot or kind == "foxglove":
            stop_on_signals(stop)
        show(viewer, stop)


def stored_player(path: Path, name: str | None, repeats: bool) -> Callable[[Viewer, threading.Event], None]:
    """A function that shows an episode of a store once at full speed, or again and again as it was recorded.

    Args:
        path: of the store or of its run.
        name: of the episode; None for the newest.
        repeats: whether it is shown until the event is set.
    """
    from user_sys.interchange.episodes import EpisodeFilter, EpisodeReader, load_robot_specs
    from user_sys.store.store import StoreReader

    store = path / "store" if (path / "store").is_dir() else path
    with StoreReader.open(store) as reader:
        episodes = EpisodeReader(reader, trimmed=True)
        chosen = episodes.select(EpisodeFilter(episodes=(name,) if name else (), incomplete=True))[-1]
        episode = episodes.read(chosen.episode)
    spec = load_robot_specs(store).get(chosen.embodiment)

    def show(viewer: Viewer, stop: threading.Event) -> None:
        show_episode(viewer, episode, spec, stop if repeats else None)
        while repeats and not stop.wait(PAUSE_S):
            show_episode(viewer, episode, spec, stop)

    return show


def _live(path: Path, robot: str, user: str | None, from_stdin: bool) -> Callable[[Viewer, threading.Event], None]:
    """Shows a robot's pictures, state and commands through the run's console."""
    from user_sys.console.accounts import CERTIFICATE, AccountStore
    from user_sys.console.watch import PersonSignIn, watch_robot
    from user_sys.run.config import open_run_folder

    folder, config, _ = open_run_folder(path)
    if not folder.console_address.exists():
        raise DataSetError(f"{path} has no console; `user-sys console {path}` serves it")
    address, person = folder.console_address.read_text(), None
    if config.console.has_accounts:
        if not user:
            raise DataSetError("people sign in to this run's console: name your account with --user")
        password = sys.stdin.readline().rstrip("\n") if from_stdin else click.prompt("Password", hide_input=True)
        own = Path(config.console.certificate or AccountStore().folder / CERTIFICATE)
        person = PersonSignIn(user, password, None if config.console.public_url else own)
    return lambda viewer, stop: watch_robot(address, robot, viewer, stop, person)
