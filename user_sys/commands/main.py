"""The command line `user-sys`. A verb's module is imported when the verb runs, so that ``--help`` is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from hal.durable import umask_from_environment
from hal.errors import HalError, install_hint
from user_sys.errors import ExitStatus, RunError, UserSysError

COMPLETION_VARIABLE = "_USER_SYS_COMPLETE"  # click's name for this program
EXIT_BROKEN_PIPE = 128 + 13
PACKAGES_FROM_EXTRA = {  # packages that are not listed come with "learner"
    "edge": ("simplejpeg", "blake3", "cryptography", "zstandard"),
    "sim": ("mujoco", "gymnasium"),
    "backup": ("fsspec", "s3fs"),
    "interchange": ("pyarrow", "av", "PIL", "mcap", "mcap_protobuf", "foxglove_schemas_protobuf"),
}
RUN = "RUN"
"""The verb of a group that takes a folder in place of another verb."""
Verbs = Mapping[str, tuple[Any, str]]
"""By name: ``module:command`` in this package, or the verbs of a group; and a summary."""

VERBS: Verbs = {
    "train": ("train:train", "start a run: robots, gateway, learner, console"),
    "cloud": ("train:cloud", "start a run whose robots connect from their own computers"),
    "edge": ("edge:edge", "drive this computer's robots for a run elsewhere"),
    "relay": ("edge:relay", "serve the robots of one site on behalf of a run elsewhere"),
    "record": ("train:record", "record demonstrations from the scripted expert"),
    "evaluate": ("train:evaluate", "measure how often the trained policy succeeds on its own"),
    "compare": ("train:compare", "compare runs: success, time to a success rate, a plot over training time"),
    "status": ("status:status", "what a run does, and what is wrong with it"),
    "top": ("status:top", "the same each second: robots, processes, faults"),
    "view": ("view:view", "show a stored episode or a live robot in Rerun or Foxglove"),
    "debug": (
        {"bundle": ("status:bundle", "pack a run's logs, settings and metrics, without secrets")},
        "collect what a bug report needs",
    ),
    "console": (
        {
            RUN: ("console:serve", "serve the console of a run that goes on without one"),
            "user": (
                {
                    "add": ("console:add", "add or replace an account: viewer, operator or admin"),
                    "remove": ("console:remove", "remove an account"),
                    "list": ("console:list_", "list the accounts"),
                },
                "accounts of the people who may sign in",
            ),
        },
        "serve a run's console; accounts for consoles that other computers can reach",
    ),
    "stop": ("stop:stop", "press the e-stop of robots that this computer drives"),
    "rearm": ("stop:rearm", "lift the e-stop of a real robot that no program drives"),
    "store": (
        {
            "inspect": ("store_inspect:inspect", "show episodes as a table, one in detail, or as pictures"),
            "verify": ("store_maintenance:verify", "read everything and list damage"),
            "repair": ("store_maintenance:repair", "quarantine damage and list the lost steps"),
            "label": ("store_label:label", "set success, reward or phase of recorded episodes"),
            "relabel": ("store_label:relabel", "label recorded episodes by a reward, such as a classifier"),
            "compact": ("store_maintenance:compact", "free the space of deleted episodes; keep to a size"),
            "backup": ("store_backup:backup", "copy a store to a folder or S3 bucket, incrementally"),
            "restore": ("store_backup:restore_", "write the store of a backup to a new folder"),
            "merge": ("store_maintenance:merge", "copy several stores into one"),
            "export": ("store_exchange:export", "write episodes as LeRobot datasets or MCAP recordings"),
            "import": ("store_exchange:import_", "add a LeRobot dataset v3 to a store"),
        },
        "inspect, repair, label, compact, back up, export or import an experience store",
    ),
    "policy": (
        {"export": ("weights:export", "write a run's policy of LeRobot for LeRobot's tools")},
        "write a run's policy for other libraries",
    ),
    "reward": (
        {
            "train": ("reward:train", "train an image classifier of success on labelled episodes"),
            "audit": ("reward:audit_", "compare a reward with labels: calibration, false positives as pictures"),
        },
        "train and audit rewards that label episodes by their pictures",
    ),
    "hardware": (
        {
            "list": ("hardware:list_", "list the present resources"),
            "watch": ("hardware:watch", "print changes of the resources, until Ctrl-C"),
            "doctor": ("hardware:doctor", "print problems of this computer, and how to fix them"),
            "plan": ("hardware:plan", "whether a job can run now, on what, or why not"),
            "quarantine": ("hardware:quarantine", "take a robot out of use at once; its lease ends"),
            "drain": ("hardware:drain", "let the robot's session finish, and start no other"),
            "restore": ("hardware:restore", "put a robot back into use"),
            "audit": ("hardware:audit", "print operators' actions, sign-ins, refusals and leases"),
        },
        "list robots and GPUs, check this computer, take robots out of use",
    ),
    "node": (
        {
            "head": ("node:head", "start a cluster; Ctrl-C ends it"),
            "join": ("node:join", "join a cluster; Ctrl-C leaves it"),
        },
        "make this computer a node of a Ray cluster, with its robots and GPUs",
    ),
    "weights": (
        {
            "list": ("weights:list_", "list the kept versions and the pinned one"),
            "rollback": ("weights:rollback", "pin a version: every robot acts with it until `release`"),
            "release": ("weights:release", "unpin: every robot acts with the newest version again"),
        },
        "list a run's versions of the policy, and pin one",
    ),
    "completion": ("main:completion", "print the script that completes verbs and options in a shell"),
    "keys": (
        {
            "new": ("keys:new", "create a key pair: FOLDER/NAME.key and FOLDER/NAME.pub"),
            "allow": ("keys:allow", "allow a public key for a name and a role"),
            "revoke": ("keys:revoke", "revoke the key of a name at once"),
            "rotate": ("keys:rotate", "replace the key of a name; the old one stays allowed for a while"),
            "list": ("keys:list_", "list the allowed keys"),
        },
        "create keys, and edit the keys that a gateway allows",
    ),
}


class LazyGroup(click.Group):
    """A group whose verbs are imported when they run; its help shows the summaries of `verbs`."""

    def __init__(self, verbs: Verbs, **settings: Any) -> None:
        super().__init__(**settings)
        self._verbs = verbs

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            if cmd_name.startswith("-"):
                return None
            raise click.NoSuchCommand(cmd_name, possibilities=self._verbs, ctx=ctx)
        target, summary = self._verbs[cmd_name]
        if not isinstance(target, str):
            return LazyGroup(target, name=cmd_name, help=f"{summary[0].upper()}{summary[1:]}.")
        module, _, attribute = target.partition(":")
        command: click.Command = getattr(import_module(f"user_sys.commands.{module}"), attribute)
        return command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if RUN in self._verbs and (args[0] == RUN or args[0] not in self._verbs) and not args[0].startswith("-"):
            return RUN, self.get_command(ctx, RUN), args
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [name for name in self._verbs if name.startswith(incomplete)]
        own = [CompletionItem(name, help=self._verbs[name][1]) for name in found]
        return own + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self._verbs.items()])


def _print_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"user-sys {version('user-sys')}")
        context.exit()


COMMAND = LazyGroup(
    VERBS,
    name="user-sys",
    help="Learn robot policies online, in the real world.",
    epilog="A verb's own help: user-sys VERB --help. Settings are overridden by --section.key=value.",
    context_settings={"max_content_width": 120},
    params=[
        click.Option(["-v", "--verbose"], count=True, help="log events; -vv: also debug messages"),
        click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
                     help="print the version and exit"),
    ],
    callback=lambda verbose: _configure_logging(verbose),
)  # fmt: skip


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    For bash, add this line to ~/.bashrc: eval "$(user-sys completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click has these three
    click.echo(kind(COMMAND, {}, "user-sys", COMPLETION_VARIABLE).source())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, or 1 if the verb defines it; 2 for an error, printed in one line; 130 for Ctrl-C."""
    if request := os.environ.get(COMPLETION_VARIABLE):  # set by the shell's script; `user-sys completion` prints it
        return shell_complete(COMMAND, {}, "user-sys", COMPLETION_VARIABLE, request)
    given = list(sys.argv[1:] if argv is None else argv)
    verbosity = [token for token in given if token in ("-v", "-vv", "--verbose")]  # before or after the verb
    try:
        os.umask(umask_from_environment())
        with COMMAND.make_context("user-sys", verbosity + [token for token in given if token not in verbosity]) as ctx:
            status: int = _with_install_hint(ctx)
        sys.stdout.flush()
        return status
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return ExitStatus.FAILED
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        print(
            f"user-sys: error: {error.format_message()}{f' ({context.command_path} --help)' if context else ''}",
            file=sys.stderr,
        )
        return ExitStatus.FAILED
    except (KeyboardInterrupt, click.Abort) as interrupt:  # Abort: at a prompt
        print(f"user-sys: interrupted{interrupt}", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    except BrokenPipeError as error:
        return EXIT_BROKEN_PIPE if _is_stdout_closed() else _print_failure(error, bool(verbosity))
    except (UserSysError, HalError, OSError) as error:
        return _print_failure(error, bool(verbosity))


def _with_install_hint(ctx: click.Context) -> int:
    try:
        return int(COMMAND.invoke(ctx) or 0)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("hal", "robots", "sim", "user_sys"):
            raise
        extra = next((extra for extra, packages in PACKAGES_FROM_EXTRA.items() if package in packages), "learner")
        raise RunError(f"this needs the package {package!r}: {install_hint(extra)}") from error


def _print_failure(error: Exception, verbose: bool) -> int:
    if verbose:
        raise error
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    print(f"user-sys: error: {' '.join(text.split()) or type(error).__name__}", file=sys.stderr)
    return ExitStatus.FAILED


def _is_stdout_closed() -> bool:
    """Whether the reader of standard output closed it (``user-sys ... | head``); then /dev/null replaces it."""
    import select

    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors only: the other end of the pipe is closed
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _configure_logging(verbose: int) -> None:
    import logging

    from user_sys.logs import configure_logging

    configure_logging((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])


if __name__ == "__main__":
    sys.exit(main())
