"""The command line `user-sys`. A verb's modules are imported when it runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hal.durable import umask_from_environment
from hal.errors import HalError, install_hint
from user_sys.commands import keys
from user_sys.commands.hardware_parser import add_hardware_parser, add_node_parser
from user_sys.commands.store import add_store
from user_sys.errors import RunError, UserSysError
from user_sys.process_exit import ExitStatus

EXIT_BROKEN_PIPE = 128 + 13
PACKAGES_FROM_EXTRA = {  # packages that are not listed come with "learner"
    "edge": ("simplejpeg", "blake3", "cryptography", "zstandard"),
    "sim": ("mujoco", "gymnasium"),
    "interchange": ("pyarrow", "av", "PIL", "mcap", "mcap_protobuf", "foxglove_schemas_protobuf"),
}

_EPILOG = "A verb's own help: user-sys VERB --help. Settings are overridden by --section.key=value."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, or 1 if the verb defines it; 2 for an error, printed in one line; 130 for Ctrl-C."""
    args = parse_args(list(sys.argv[1:] if argv is None else argv))
    try:
        _configure_logging(args.verbose)
        os.umask(umask_from_environment())
        status = _run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _print_interrupted(args)
    except BrokenPipeError as error:
        return EXIT_BROKEN_PIPE if _is_stdout_closed() else _print_failure(error, args.verbose)
    except (UserSysError, HalError, OSError) as error:
        return _print_failure(error, args.verbose)


def _run(args: argparse.Namespace) -> int:
    module, function = args.runs
    try:
        status: int = getattr(importlib.import_module(module), function)(args)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("hal", "robots", "sim", "user_sys"):
            raise
        raise RunError(f"this needs the package {package!r}: {install_hint(_extra_for(package))}") from error
    return status


def _extra_for(package: str) -> str:
    return next((extra for extra, packages in PACKAGES_FROM_EXTRA.items() if package in packages), "learner")


def _print_failure(error: Exception, verbose: int) -> int:
    if verbose:
        raise error
    print(f"user-sys: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return ExitStatus.FAILED


def _print_interrupted(args: argparse.Namespace) -> int:
    run = getattr(args, "run_dir", None) or getattr(args, "resume", None)
    hint = f"; continue with: user-sys {args.verb} --resume {run}" if run else ""
    print(f"user-sys: interrupted{hint}", file=sys.stderr)
    return ExitStatus.INTERRUPTED


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


# Parsers --------------------------------------------------------------------------------------------------------------


class _Version(argparse.Action):
    """Prints the version; it is looked up only for this option."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"user-sys {version('user-sys')}")
        parser.exit()


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser, verbs = _parser()
    overrides: list[str] = []
    verb = next((token for token in argv if not token.startswith("-")), "")
    if verb in verbs:
        argv, overrides = _split_overrides(argv, verbs[verb])
    args = parser.parse_args(argv)
    args.overrides = overrides
    args.verbose = getattr(args, "verbose", 0)
    if verb in ("train", "cloud") and not args.config and not args.resume:
        verbs[verb].error("CONFIG is missing: give one, such as configs/demo.yaml, or --resume RUN")
    if verb in ("train", "cloud") and args.restart_if_unreadable and not args.resume:
        verbs[verb].error("--restart-if-unreadable needs --resume RUN")
    return args


def _split_overrides(argv: list[str], verb: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Separates every ``--key=value`` and ``--key value`` that is not an option of `verb`.

    argparse would take the value of the latter for a positional argument.
    """
    ours: list[str] = []
    overrides: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("--") or token.partition("=")[0] in verb._option_string_actions:
            ours.append(token)
            continue
        overrides.append(token)
        if "=" not in token and tokens and not tokens[0].startswith("--"):
            overrides.append(tokens.pop(0))
    return ours, overrides


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(prog="user-sys", description="Learn robot policies online, in the real world.", epilog=_EPILOG)
    parser.add_argument("--version", action=_Version)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_Parser)
    named = {
        "train": _add_train(verbs),
        "cloud": _add_cloud(verbs),
        "edge": _add_edge(verbs),
        "relay": _add_relay(verbs),
        "record": _add_record(verbs),
    }
    _add_evaluate(verbs)
    _add_stop(verbs)
    add_store(verbs)
    add_hardware_parser(verbs)
    add_node_parser(verbs)
    _add_weights(verbs)
    keys.add_parser(verbs).set_defaults(runs=("user_sys.commands.keys", "run"))
    return parser, named


class _Parser(argparse.ArgumentParser):
    """Accepts options in full only, and ``-v`` before or after the verb."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.add_argument(
            "-v", "--verbose", action="count", default=argparse.SUPPRESS, help="log events; -vv: also debug messages"
        )


def _add_train(verbs: Any) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        "train",
        help="start a run: robots, gateway, learner, console",
        description="Starts a run and shows its progress. Ctrl-C stops it cleanly and prints how to resume. "
        "The exit status is 0 if the run reached its target, 1 if it did not, 2 for an error, 130 for Ctrl-C.",
        epilog="Any setting: --learner.batch_size=128, --robots.0.name=left, --ray.address=ADDRESS.",
    )
    _add_run(verb)
    verb.add_argument("--keys", type=Path, metavar="FOLDER", help="folder of keys (default: the run makes its own)")
    verb.set_defaults(runs=("user_sys.commands.train", "train_main"), verb="train")
    return verb


def _add_cloud(verbs: Any) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        "cloud",
        help="start a run whose robots connect from their own computers",
        description="Starts gateway, learner and console, and trains with the robots that connect (`user-sys edge`).",
        epilog="Any setting: --gateway.endpoint=tcp://0.0.0.0:5555. docs/deployment.md has the steps.",
    )
    _add_run(verb)
    _add_keys(verb)
    verb.set_defaults(runs=("user_sys.commands.train", "cloud_main"), verb="cloud")
    return verb


def _add_run(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "config", type=Path, metavar="CONFIG", nargs="?", help="YAML file of settings, such as configs/demo.yaml"
    )
    verb.add_argument("--resume", type=Path, metavar="RUN", help="continue the run in this folder")
    verb.add_argument(
        "--restart-if-unreadable",
        action="store_true",
        help="with --resume: if a learner has no readable checkpoint, train it from the start; checkpoints are kept",
    )
    verb.add_argument("--name", help="name of the run's folder in runs/ (default: from the configuration and the time)")
    verb.add_argument("--any-result", action="store_true", help="exit status 0 also if the target was not reached")


def _add_edge(verbs: Any) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        "edge",
        help="drive this computer's robots for a run elsewhere",
        description="Drives the robots of CONFIG for the run at --connect, until the run ends, or Ctrl-C.",
        epilog="Any setting can be overridden: --section.key=value.",
    )
    verb.add_argument("config", type=Path, metavar="CONFIG", help="YAML file that names this computer's robots")
    verb.add_argument(
        "--robot",
        action="append",
        default=[],
        metavar="NAME",
        help="CONFIG is a run's file: drive this one of its remote_robots; repeatable",
    )
    verb.add_argument(
        "--connect", required=True, metavar="tcp://HOST:PORT", help="the gateway, or a relay of this site"
    )
    verb.add_argument(
        "--folder", type=Path, default=Path("edge"), metavar="FOLDER", help="outboxes, e-stops, logs (default: edge)"
    )
    _add_keys(verb)
    verb.set_defaults(runs=("user_sys.commands.edge", "edge_main"))
    return verb


def _add_relay(verbs: Any) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        "relay",
        help="serve the robots of one site on behalf of a run elsewhere",
        description="Forwards messages of a site's robots to the run at --connect, and fetches weights once for all.",
        epilog="Any setting can be overridden: --section.key=value.",
    )
    verb.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with the relay's name and endpoint")
    verb.add_argument("--connect", required=True, metavar="tcp://HOST:PORT", help="the gateway")
    verb.add_argument("--folder", type=Path, default=Path("relay"), metavar="FOLDER", help="weights (default: relay)")
    _add_keys(verb)
    verb.set_defaults(runs=("user_sys.gateway.relay", "relay_main"))
    return verb


def _add_keys(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--keys", type=Path, default=Path("keys"), metavar="FOLDER", help="folder of keys (default: keys)"
    )


def _add_record(verbs: Any) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        "record",
        help="record demonstrations from the scripted expert",
        description="Records demonstrations by the task's scripted expert, for each robot of CONFIG, into a store.",
        epilog="Any setting can be overridden: --section.key=value.",
    )
    verb.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of settings, such as configs/demo.yaml")
    verb.add_argument(
        "--output", type=Path, default=Path("runs/demonstrations"), metavar="PATH", help="store to add to"
    )
    verb.add_argument("--episodes", type=_count, default=20, metavar="N", help="demonstrations per robot (default: 20)")
    verb.set_defaults(runs=("user_sys.commands.train", "record_main"))
    return verb


def _add_evaluate(verbs: Any) -> None:
    verb = verbs.add_parser(
        "evaluate",
        help="measure how often the trained policy succeeds on its own",
        description="Runs the newest policy of RUN without a person and reports its success with a 95%% interval.",
    )
    verb.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/latest")
    verb.add_argument("--episodes", type=_count, default=100, metavar="N", help="episodes to run (default: 100)")
    verb.add_argument(
        "--robot", metavar="NAME", help="on this robot, with its embodiment's policy (default: the first)"
    )
    verb.add_argument("--json", action="store_true", help="for other programs")
    verb.set_defaults(runs=("user_sys.commands.train", "evaluate_main"))


def _add_stop(verbs: Any) -> None:
    verb = verbs.add_parser(
        "stop",
        help="press the e-stop of robots that this computer drives",
        description="Presses the e-stop of each ROBOT, or of every robot that this computer drives, for any program "
        "and user, and reports which driver acknowledged. Exit status 1: a robot is unknown or did not answer, or no "
        "robot is driven. A person re-arms it at a run's console, or with `user-sys rearm`.",
    )
    verb.add_argument("robots", nargs="*", metavar="ROBOT", help="a robot's name (default: all that are driven)")
    verb.add_argument("--by", default=None, metavar="NAME", help="name of the person (default: the logged-in user)")
    verb.add_argument("--reason", default="", metavar="TEXT", help="reason; saved with the e-stop and logged")
    verb.set_defaults(runs=("user_sys.commands.stop", "stop_main"))
    verb = verbs.add_parser(
        "rearm",
        help="lift the e-stop of a robot that no program drives",
        description="Lifts the latched e-stop of ROBOT. If a run drives it, use its console.",
    )
    verb.add_argument("robot", metavar="ROBOT", help="the robot's name")
    verb.add_argument("--by", default=None, metavar="NAME", help="name of the person (default: the logged-in user)")
    verb.set_defaults(runs=("user_sys.commands.stop", "rearm_main"))


def _add_weights(verbs: Any) -> None:
    weights = verbs.add_parser("weights", help="list a run's versions of the policy, and pin one")
    orders = weights.add_subparsers(metavar="ACTION", required=True, parser_class=_Parser)
    listing = orders.add_parser("list", help="list the kept versions and the pinned one")
    listing.add_argument("--json", action="store_true", help="for other programs")
    rollback = orders.add_parser("rollback", help="pin a version: every robot acts with it until `release`")
    rollback.add_argument("version", type=int, metavar="VERSION", help="one that `list` shows")
    release = orders.add_parser("release", help="unpin: every robot acts with the newest version again")
    for order, runs in ((listing, "list_main"), (rollback, "rollback_main"), (release, "release_main")):
        order.add_argument("run", type=Path, metavar="RUN", help="run folder on the gateway's machine: runs/latest")
        order.add_argument(
            "--learner", default="learner", metavar="NAME", help="which learner of the run (default: the first)"
        )
        order.set_defaults(runs=("user_sys.commands.weights", runs))
    for order in (rollback, release):
        order.add_argument(
            "--by", default=None, metavar="NAME", help="name of the person (default: the logged-in user)"
        )
        order.add_argument("--reason", default="", metavar="TEXT", help="reason; saved and logged")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
