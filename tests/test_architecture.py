"""The structure of the tree: import directions, modules of large libraries, size budgets."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("hal", "robots", "sim", "user_sys")
FOLDERS = {*PACKAGES, "configs", "tests", "docker", "benchmarks", "docs"}
BUILT = {"build", "dist", "runs"}  # by tools and runs; git ignores them

# Which of our packages a package may import. One file may import concrete robots and simulations.
MAY_IMPORT = {"hal": {"hal"}, "robots": {"robots", "hal"}, "sim": {"sim", "hal"}, "user_sys": {"user_sys", "hal"}}
COMPOSE = "user_sys/compose.py"

# The modules that a library is named for; a prefix that ends in '/' is a folder.
ROOMS = {
    "ray": ("hal/ray_cluster.py",),
    "zmq": ("user_sys/tunnel/", "user_sys/edge/", "user_sys/inference/"),
    "mujoco": ("sim/",),
    "gymnasium": ("sim/",),
    "torch": (
        "user_sys/algorithms/",
        "user_sys/learner/",
        "user_sys/run/learner_process.py",
        "user_sys/policies/",
        "user_sys/replay/sampler.py",
        "user_sys/rewards/classifier.py",
        "user_sys/rewards/networks.py",
        "user_sys/rewards/progress.py",
        "user_sys/weights/gpu_",
    ),
    "transformers": ("user_sys/policies/",),
    "fastapi": ("user_sys/console/",),
    "starlette": ("user_sys/console/",),
    "uvicorn": ("user_sys/console/",),
    "websockets": ("user_sys/console/",),
    "viser": ("user_sys/console/scene_process.py",),
    "rerun": ("user_sys/interchange/",),
    "foxglove": ("user_sys/interchange/",),
    "prometheus_client": ("user_sys/run/exporter.py",),
    "fsspec": ("user_sys/store/backup.py",),
    "wandb": ("user_sys/run/metrics.py",),
    "tensorboard": ("user_sys/run/metrics.py",),
    "matplotlib": ("user_sys/run/report.py", "user_sys/rewards/audit.py", "user_sys/commands/store_inspect.py"),
    "draccus": ("robots/lerobot_plugins.py",),
    "lerobot": ("robots/lerobot_plugins.py", "user_sys/policies/lerobot.py"),
    "rclpy": ("robots/ros2_node.py",),
    "pygame": ("robots/input_devices.py",),
    "pyspacemouse": ("robots/input_devices.py",),
    "click": ("user_sys/commands/",),
    "yaml": ("user_sys/config.py",),
    "pynvml": ("hal/",),
    "pyarrow": ("user_sys/interchange/",),
    "av": ("user_sys/video.py",),
    "mcap": ("user_sys/interchange/",),
}
PICKLERS = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
# Private names that tests may reach, all of libraries, because these have no public name for it.
PRIVATE = {
    "_exit": "os: ends a process without clean-up",
    "_getframe": "sys: the caller, for a model of the disk",
    "_replace": "public, of named tuples",
    "_foreach_lerp_": "torch: the update of the averaged weights, as LeRobot does it",
    "_private": "Ray: its own authentication",
}
DRAWERS = {"util", "utils", "helper", "helpers", "common", "core", "misc"}

# Modules of processes that must start fast and stay small, and what none of them may bring in.
LIGHT = (
    "hal.robot",
    "hal.safety",
    "robots.fake",
    "user_sys.commands.main",
    "user_sys.config",
    "user_sys.console.hub",
    "user_sys.edge.driver_server",
    "user_sys.commands.edge",
    "user_sys.edge.outbox",
    "user_sys.gateway",
    "user_sys.commands.hardware",
    "user_sys.inference.__main__",
    "user_sys.run.edge_console",
    "user_sys.run.launcher",
    "user_sys.run.metrics",
    "user_sys.run.progress",
    "user_sys.run.prepare",
    "user_sys.replay.buffer",
    "user_sys.run.report",
    "user_sys.store.store",
    "user_sys.tunnel.client",
    "user_sys.tunnel.server",
)
HEAVY = (
    *("torch", "ray", "mujoco", "matplotlib", "fastapi", "wandb", "tensorboard", "gymnasium", "pyarrow", "av"),
    "safetensors",
)

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
MAX_P95_LINES = 45
MAX_MEDIAN_LINES = 8


@cache
def _modules() -> dict[str, Path]:
    """Dotted name to file, of every module that is shipped."""
    files = [f for package in PACKAGES for f in sorted((ROOT / package).rglob("*.py"))]
    names = [".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files]
    return dict(zip(names, files, strict=True))


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))


@cache
def _imports(name: str) -> list[tuple[str, int]]:
    """The imports of a module with their lines, also in functions and for type checkers."""
    return list(_found_imports(name))


def _found_imports(name: str) -> Iterator[tuple[str, int]]:
    known = _modules()
    path = known[name]
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            origin = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*origin, *([node.module] if node.module else [])])
            for alias in node.names:
                yield (f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base), node.lineno


def _where(name: str, line: int) -> str:
    return f"{_relative(_modules()[name])}:{line}"


def test_imports_run_one_way() -> None:
    wrong = []
    for name, path in _modules().items():
        if _relative(path) == COMPOSE:
            continue
        allowed = MAY_IMPORT[name.split(".")[0]]
        for imported, line in _imports(name):
            package = imported.split(".")[0]
            if package in PACKAGES and package not in allowed:
                wrong.append(f"{_where(name, line)} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_import_cycle() -> None:
    graph = {name: {i for i, _ in _imports(name) if i in _modules() and i != name} for name in _modules()}
    cycles = _cycles(graph)
    assert not cycles, "\n".join(" -> ".join(cycle) for cycle in cycles)


def test_no_two_packages_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for name in _modules():
        imported = {_package(each) for each, _ in _imports(name) if each in _modules()}
        graph.setdefault(_package(name), set()).update(imported - {_package(name)})
    pairs = {(a, b) for a in graph for b in graph[a] if a < b and a in graph.get(b, ())}
    assert pairs - {("user_sys.learner", "user_sys.run")} == set()  # the learner's entry point reads the run's config


def _package(module: str) -> str:
    """The folder of a module below its package, or the module itself if it is at the top of the package."""
    return ".".join(module.split(".")[:2])


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One cycle through each module that the search meets again on its path."""
    cycles: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        if name in way:
            cycles.append([*way[way.index(name) :], name])
        elif name not in done:
            for imported in sorted(graph[name]):
                visit(imported, [*way, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return cycles


@pytest.mark.parametrize("library", ROOMS)
def test_a_library_appears_only_in_the_modules_named_for_it(library: str) -> None:
    wrong = [
        f"{_where(name, line)} imports {imported}"
        for name, path in _modules().items()
        if not _relative(path).startswith(ROOMS[library])
        for imported, line in _imports(name)
        if imported.split(".")[0] == library
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_pickled() -> None:
    wrong = [f"{_where(n, line)} imports {i}" for n in _modules() for i, line in _imports(n) if i in PICKLERS]
    for path in _modules().values():
        for node in _nodes(path):
            if isinstance(node, ast.Call) and _unpickles(node):
                wrong.append(f"{_relative(path)}:{node.lineno} {ast.unparse(node)[:80]}")
    assert not wrong, "\n".join(wrong)


def _unpickles(call: ast.Call) -> bool:
    given = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
    function = ast.unparse(call.func)
    return (function == "torch.load" and given.get("weights_only") is not True) or bool(given.get("allow_pickle"))


def test_tests_reach_no_private_name() -> None:
    wrong = [
        f"{_relative(path)}:{node.lineno} reaches {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in _nodes(path)
        if isinstance(node, (ast.Attribute, ast.ImportFrom, ast.Call))
        for name in _reached(node)
        if name.startswith("_") and not name.endswith("__") and name not in PRIVATE
    ]
    assert not wrong, "\n".join(wrong)


def _reached(node: ast.Attribute | ast.ImportFrom | ast.Call) -> list[str]:
    """The names that a node reads of other objects and modules, also by ``setattr`` and the like with a constant."""
    match node:
        case ast.Attribute(ast.Name("self" | "cls") | ast.Call(ast.Name("super"))):
            return []
        case ast.Attribute(_, name):
            return [name]
        case ast.ImportFrom(_, names):
            return [alias.name for alias in names]
        case ast.Call(ast.Name(name) | ast.Attribute(_, name), arguments) if name.endswith("attr"):
            texts = [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            return [part for text in texts for part in text.split(".")]
    return []


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{_relative(path)}:{node.lineno}"
        for path in _modules().values()
        if _relative(path) != "user_sys/commands/main.py"
        for node in _nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_top_level_is_as_designed() -> None:
    with_code = {f.relative_to(ROOT).parts[0] for f in ROOT.glob("[!.]*/**/*.py")} | {f.name for f in ROOT.glob("*.py")}
    assert with_code - FOLDERS - BUILT == set()
    assert [package for package in PACKAGES if not (ROOT / package / "__init__.py").exists()] == []


def test_no_module_is_a_drawer() -> None:
    assert [name for name in _modules() if DRAWERS & set(name.split("."))] == []


def test_pinned_versions_name_no_place() -> None:
    lines = [
        line
        for name in ("constraints.txt", "constraints-lerobot.txt")
        for line in (ROOT / name).read_text().splitlines()
    ]
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if "/" in line or "@" in line or line.count("==") != 1 or "+" in line] == []


def test_files_and_functions_keep_their_budgets() -> None:
    sizes = {_relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in _modules().values()}
    long = [f"{name}: {lines} lines" for name, lines in sizes.items() if lines > MAX_FILE_LINES]
    functions = {
        f"{_relative(path)}:{node.lineno} {node.name}": _code_lines(node)
        for path in _modules().values()
        for node in _nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    long += [f"{name}: {lines} lines" for name, lines in functions.items() if lines > MAX_FUNCTION_LINES]
    assert not long, "\n".join(long)
    assert statistics.median(functions.values()) <= MAX_MEDIAN_LINES
    assert statistics.quantiles(functions.values(), n=20)[-1] <= MAX_P95_LINES


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without the docstring: that one is a contract, not code."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is None:
        return lines
    return lines - ((first.end_lineno or first.lineno) - first.lineno + 1)


def test_light_modules_stay_light() -> None:
    probe = (
        "import importlib, sys\n"
        f"for name in {LIGHT!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]
