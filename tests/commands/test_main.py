"""The command line: instant help, one line for an error, exit status."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from hal.errors import LeaseHeld, install_hint
from user_sys.commands import train
from user_sys.commands.main import main
from user_sys.commands.options import parse_duration_s, parse_size
from user_sys.commands.output import size_text
from user_sys.errors import RunError
from user_sys.run.prepare import LaunchRequest

HEAVY = ("torch", "ray", "mujoco", "numpy", "zmq", "rich", "yaml", "msgspec")
Verb = Callable[[Callable[[LaunchRequest], int]], None]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Verb:
    """Puts a function in the place of a whole run, which needs Ray and minutes."""
    return lambda function: monkeypatch.setattr(train, "launch_run", function)


def _fail(error: BaseException) -> Callable[[LaunchRequest], int]:
    def verb(args: LaunchRequest) -> int:
        raise error

    return verb


def test_help_imports_nothing_heavy() -> None:
    probe = (
        "import sys\nfrom user_sys.commands.main import main\n"
        "assert main(['--help']) == 0\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for verb in ("train", "cloud", "edge", "relay", "evaluate", "record", "stop", "keys", "store", "hardware"):
        assert f"\n  {verb} " in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["train"],
        ["evaluate", "runs/latest"],
        ["record", "c.yaml"],
        ["stop"],
        ["keys"],
        ["keys", "new"],
        ["store", "inspect"],
        ["hardware", "list"],
    ],
)
def test_every_verb_has_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: user-sys")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("user-sys ")


def test_overrides_are_separated_at_any_position(launch: Verb) -> None:
    seen: list[LaunchRequest] = []
    launch(lambda args: seen.append(args) or 7)  # type: ignore[func-returns-value]
    argv = [
        "-v",
        "train",
        "--learner.batch_size",
        "128",
        "configs/demo.yaml",
        "--any-result",
        "--seed=3",
        "--a.b",
        "-1",
    ]
    assert main(argv) == 7
    (args,) = seen
    assert (args.config, args.any_result, args.resume) == (Path("configs/demo.yaml"), True, None)
    assert args.overrides == ["--learner.batch_size", "128", "--seed=3", "--a.b", "-1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Usage: user-sys"),
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["store", "verfy"], "Did you mean 'verify'?"),
        (["evaluate", "runs/latest", "--episode", "3"], "'--episodes'"),
        (["train"], "CONFIG is missing"),
        (
            ["train", "configs/demo.yaml", "--resume", "runs/a"],
            "takes the settings of RUN: leave out configs/demo.yaml",
        ),
        (["cloud", "--resume", "runs/a", "--keys=keys"], "runs/a/keys: leave out --keys"),
        (["train", "--resum", "runs/a"], "No such option '--resum'. Did you mean '--resume'?"),
        (["train", "configs/demo.yaml", "--target.success=1.1"], "--target.success: expected a number <= 1.0, got 1.1"),
        (["train", "configs/demo.yaml", "--name", "../../evil"], "--name: expected letters, digits"),
        (["train", "configs/demo.yaml", "--learner.batch_sze=3"], "did you mean 'learner.batch_size'?"),
        (["evaluate", "runs/latest", "--episodes", "0"], "0 is not in the range x>=1"),
        (["evaluate", "runs/latest", "--learner.seed=1"], "No such option '--learner.seed'"),
        (["store", "inspect"], "PATH"),
    ],
)
def test_wrong_usage_prints_the_problem(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err and (not argv or err.count("\n") == 1)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RunError("port 8088 is in use;\n take another"), "port 8088 is in use; take another"),
        (LeaseHeld("panda-0 is driven by lab-2"), "panda-0 is driven by lab-2"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/a"), "error: runs/a: No space left on device"),
        (ModuleNotFoundError("No module named 'ray'", name="ray"), "'ray': " + install_hint("learner")),
        (ModuleNotFoundError("No module named 'av'", name="av.codec"), "'av': " + install_hint("interchange")),
    ],
)
def test_error_prints_one_line(
    error: Exception, message: str, launch: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(_fail(error))
    assert main(["train", "demo.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("user-sys: error: ") and err.endswith(f"{message}\n") and err.count("\n") == 1


def test_keys_of_a_resumed_run_may_be_named(launch: Verb, tmp_path: Path) -> None:
    """Containers start and resume with the same options."""
    launch(lambda args: 7)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "keys").symlink_to(tmp_path / "keys")
    assert main(["cloud", "--resume", str(tmp_path / "run"), f"--keys={tmp_path / 'keys'}"]) == 7
    assert main(["cloud", "--resume", str(tmp_path / "run")]) == 7


def test_verbose_raises_the_error(launch: Verb) -> None:
    launch(_fail(RunError("no")))
    with pytest.raises(RunError):
        main(["train", "demo.yaml", "-v"])


def test_relay_refuses_an_invalid_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "relay.yaml").write_text("name: lab\n")
    wrong = ("desk:5555", "tcp://desk:99999", "tcp://desk:0", "tcp://desk", "tcp://::1:5555", "tcp://[desk]:5555")
    for endpoint in wrong:
        assert main(["relay", str(tmp_path / "relay.yaml"), "--connect", endpoint]) == 2
        assert f"user-sys: error: --connect {endpoint}: expected tcp://HOST:PORT" in capsys.readouterr().err


def test_interrupt_prints_how_to_resume(launch: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: LaunchRequest) -> int:
        args.folder = Path("runs/demo-1")
        raise KeyboardInterrupt

    launch(interrupted)
    assert main(["train", "demo.yaml"]) == 130
    assert capsys.readouterr().err == "user-sys: interrupted; continue with: user-sys train --resume runs/demo-1\n"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), click.Abort()], ids=["Ctrl-C", "at a prompt"])
def test_interrupt_before_the_run_exists(
    interrupt: BaseException, launch: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(_fail(interrupt))
    assert main(["train", "demo.yaml"]) == 130
    assert capsys.readouterr().err == "user-sys: interrupted\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [("user-sys sto", "stop store"), ("user-sys store ver", "verify"), ("user-sys train --resu", "--resume")],
)
def test_bash_completes_verbs_and_options(words: str, found: str) -> None:
    given = words.split()
    script = (
        f'eval "$(user-sys completion bash)"; COMP_WORDS=({words}); COMP_CWORD={len(given) - 1}; '
        "_user_sys_completion user-sys; echo ${COMPREPLY[@]}"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=300, env=os.environ | {"PATH": path}
    )
    assert done.stdout.strip() == found, done.stderr


def test_size_or_time_of_hundreds_of_digits_is_refused() -> None:
    assert parse_size("1.5 GB") == 1_500_000_000 and parse_duration_s("7d") == 7 * 86400
    with pytest.raises(click.BadParameter, match="expected a size"):
        parse_size("9" * 400)
    with pytest.raises(click.BadParameter, match="expected a time"):
        parse_duration_s("9" * 400 + "d")


def test_size_is_shown_with_three_digits() -> None:
    assert [size_text(size) for size in (999, 999.6, 999_400, 999_600, 1e12)] == [
        "999 B", "1 kB", "999 kB", "1 MB", "1 TB"
    ]  # fmt: skip


def test_closed_output_is_not_an_error() -> None:
    program = (
        "import sys\nfrom user_sys.commands import train\nfrom user_sys.commands.main import main\n"
        "train.launch_run = lambda request: [print('x' * 80) for _ in range(100_000)] and 0\n"
        "sys.exit(main(['train', 'c.yaml']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(timeout=300) == 141
