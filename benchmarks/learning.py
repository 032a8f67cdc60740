"""How well and how fast policies learn (goals 12 to 14): whole runs, as a person starts them, with several seeds.

    python -m benchmarks.learning                    # every part, one after the other
    python -m benchmarks.learning state peg --seeds 0,1,2
    python -m benchmarks.learning pixels --quick     # a short form of each run, only to see whether it works

A part is a list of variants: a configuration with overrides. Each variant trains with each seed by ``user-sys train``
and is evaluated on 100 starts. A part writes ``benchmarks/out/learning-<part>.json``, and a plot with bands over the
seeds, ``learning-<part>.png`` (`user_sys.run.compare`). ``--runs DIR`` keeps the runs; those that are there already
are not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import learning_checks, peers
from benchmarks.harness import OUT, ROOT, Row, at_least, at_most, report, user_sys
from user_sys.run.compare import Variant, draw_comparison, read_variants

SEEDS = (0, 1, 2)
PEER_LIMIT_S = 300.0
RUN_MAX_S = 3600.0  # of training
RUN_SLACK_S = 900.0  # of a run, for start, demonstrations and evaluation
BEYOND_S = 1800.0  # of training after the target
ENDED = (0, 1)  # exit statuses of a run that came to its end: its target was reached, or was not
ALWAYS = (
    "--console.enabled=false",
    "--logging.wandb.mode=disabled",
    "--evaluation.video_episodes=0",
    "--evaluation.video_failures=0",
)
QUICK = (
    "--learner.max_training_s=10",
    "--learner.warmup_updates=20",
    "--demonstrations.episodes=3",
    "--evaluation.episodes=3",
)
RANDOMISED = "--robots.0.options={image_height: 64, image_width: 64, randomise: 1, distractors: 2}"
BC = ("--learner.algorithm=bc", "--learner.options={action_noise: 0.05}")
TRAINED_ENCODER = "--policy.options={}"
TRAINED_ON = (  # an encoder that has seen 20 randomised scenes only must not freeze
    "--policy.options={pretrain_updates: 250}",
    "--learner.batch_size=64",
    "--learner.max_training_s=1800",
)
Q_CHUNKING = ("--learner.algorithm=q_chunking", "--policy.kind=flow", "--policy.options={flow_steps: 1}")
SAC_FLOW = (
    "--learner.algorithm=sac_flow",
    "--policy.kind=gated_flow",
    "--learner.options={cloning: 5.0, critics_first: 600, initial_temperature: 0.0003}",
)
FLOW = ("--policy.kind=flow", "--demonstrations.episodes=5", "--learner.batch_size=64")
ON_DROP = "--learner.publish.on_success_drop=best"
REAL_TIME = ("--robots.0.real_time=true",)
HG_DAGGER = (
    "--learner.algorithm=hg_dagger",
    "--learner.options={steps: [demonstrations, successes]}",
    "--robots.0.teleoperators=[{kind: scripted, after_steps: 25}]",
    "--demonstrations.episodes=5",
    "--learner.max_training_s=900",
    "--learner.batch_size=64",
    TRAINED_ENCODER,
)


@dataclass(frozen=True)
class Entry:
    """One variant of a part.

    Attributes:
        name: of its runs, before the seed.
        config: a file of ``configs/``.
        overrides: of its settings, besides `ALWAYS`.
        success: least share of the evaluation that meets the goal; None if nothing is asked of this variant.
        seconds: most training time.
        start: the variant whose policy this one starts from.
    """

    name: str
    config: str
    overrides: tuple[str, ...] = ()
    success: float | None = None
    seconds: float | None = None
    start: str = ""


@dataclass(frozen=True)
class Finished:
    """The runs of one variant, one for each seed."""

    entry: Entry
    runs: tuple[Path, ...]

    @property
    def summaries(self) -> list[dict[str, Any]]:
        return [json.loads((run / "summary.json").read_text()) for run in self.runs]


Check = Callable[[dict[str, Finished], bool], Iterator[Row]]
"""More rows from the runs of a part, by variant; the flag asks for a short form."""


@dataclass(frozen=True)
class Part:
    """Variants that are compared."""

    entries: tuple[Entry, ...]
    goal: int = 12
    check: Check | None = None
    quick: tuple[str, ...] = QUICK


def _fleet(robots: int) -> str:
    items = (f"{{name: panda-{n}, driver: sim, task: lift, real_time: true}}" for n in range(robots))
    return f"--robots=[{', '.join(items)}]"


def _lasting(seconds: float) -> tuple[str, ...]:
    """Overrides of a run that trains for so long, whatever it reaches."""
    return (f"--learner.max_training_s={seconds:g}", "--target.success=0")


CONDITIONAL = "pictures: true, conditions: 2, execute: 2"  # of 8 actions: open loop, a success says less of the policy
ADVANTAGED = "condition: 1, guidance: 1.5, noise_scale: 0.3, exploration: 0.05"
CLONED = (*FLOW, "--learner.algorithm=bc", f"--policy.options={{{CONDITIONAL}}}")
EQUAL_UPDATES = (*_lasting(3600), "--learner.max_updates=4000")
PARTS: dict[str, Part] = {
    "state": Part(
        tuple(
            Entry(arm, f"{config}.yaml", success=0.95, seconds=60.0)
            for arm, config in (("panda", "demo"), ("so101", "demo-so101"), ("ur5e", "demo-ur5e"))
        ),
        check=lambda runs, quick: state_peers(runs["panda"], quick),
    ),
    "pixels": Part(
        (
            Entry("rlpd", "demo-pixels.yaml", (), 0.95, 600.0),
            Entry("bc", "demo-pixels.yaml", (*BC, TRAINED_ENCODER, *_lasting(120))),
            Entry("rlpd-state", "demo.yaml", ("--learner.batch_size=128", *_lasting(60))),
        ),
        check=lambda runs, quick: learning_checks.pixel_rows(
            runs["rlpd"].runs, runs["rlpd-state"].runs, 4 if quick else 50
        ),
    ),
    "randomised": Part(
        (
            Entry("rlpd-randomised", "demo-pixels.yaml", (RANDOMISED, *TRAINED_ON), 0.90, 1800.0),
            Entry("bc-randomised", "demo-pixels.yaml", (*BC, TRAINED_ENCODER, RANDOMISED, *_lasting(300))),
        ),
    ),
    "peg": Part(
        (
            Entry("rlpd", "peg.yaml", (), 0.95, 1200.0),
            Entry("bc", "peg.yaml", (*BC, *_lasting(120))),
            Entry("sac", "peg.yaml", ("--learner.algorithm=sac",)),
            Entry("q-chunking", "peg.yaml", (*Q_CHUNKING, "--learner.options={}")),
            Entry("sac-flow", "peg.yaml", SAC_FLOW, 0.90, 1200.0),
        ),
    ),
    "recap": Part(
        (
            Entry("cloned", "demo-pixels.yaml", (*CLONED, *_lasting(3600), "--learner.max_updates=2000")),
            Entry("demonstrations", "demo-pixels.yaml", (*CLONED, *EQUAL_UPDATES), start="cloned"),
            Entry(
                "recap",
                "demo-pixels.yaml",
                (
                    *FLOW, "--learner.algorithm=recap", f"--policy.options={{{CONDITIONAL}, {ADVANTAGED}}}",
                    *EQUAL_UPDATES,
                ),
                start="cloned",
            ),
        ),
        check=lambda runs, quick: gain_rows(runs, "recap", "demonstrations", 0.15),
    ),
    "ppo": Part(
        (
            Entry("bc", "demo.yaml", ("--robots.0.task=reach", *BC, *_lasting(60), "--learner.max_updates=70")),
            *(
                Entry(
                    f"ppo-staleness-{staleness}",
                    "demo.yaml",
                    (
                        "--robots.0.task=reach", "--demonstrations.episodes=0", "--learner.algorithm=ppo",
                        f"--learner.staleness={staleness}", "--learner.batch_size=32", "--learner.sampler.n_step=1",
                        "--learner.max_training_s=600",
                    ),
                    0.95,
                    600.0,
                    start="bc",
                )
                for staleness in (0, 2, 8)
            ),
        ),
        quick=(*QUICK[:2], *QUICK[3:]),
    ),
    "asynchrony": Part(
        (
            Entry("asynchronous", "demo.yaml", (*REAL_TIME, *_lasting(600))),
            Entry("synchronous", "demo.yaml", (*REAL_TIME, *_lasting(60), "--learner.staleness=0")),  # of updates
        ),
        goal=13,
        check=lambda runs, quick: asynchrony_rows(runs),
    ),
    "robots": Part(
        tuple(
            Entry(f"robots-{n}", "demo.yaml", (_fleet(n), "--learner.max_training_s=1800", "--target.success=0.8"))
            for n in (1, 2, 4, 8)
        ),
        goal=14,
        check=lambda runs, quick: scaling_rows(runs),
    ),
    "hg-dagger": Part((Entry("hg-dagger", "demo-pixels.yaml", HG_DAGGER, 0.95),)),
    "staying": Part(
        (Entry("staying", "demo.yaml"),), check=lambda runs, quick: staying_rows(runs["staying"].runs, quick)
    ),
}  # fmt: skip


def train(entry: Entry, seed: int, runs: Path, overrides: Sequence[str]) -> Path:
    """Trains once, unless the run is there, and returns its folder.

    Raises:
        CalledProcessError: the run failed.
        TimeoutExpired: it took longer than its training time and `RUN_SLACK_S`.
    """
    folder = runs / f"{entry.name}-seed{seed}"
    if (folder / "summary.json").exists():
        return folder
    start = [f"--learner.initial_policy={runs / f'{entry.start}-seed{seed}'}"] if entry.start else []
    arguments = [f"--name={folder.name}", f"--runs={runs}", f"--seed={seed}", "--any-result"]
    command = user_sys("train", ROOT / "configs" / entry.config, *arguments)
    command += [*ALWAYS, *entry.overrides, *start, *overrides]
    print("==", " ".join(command[2:]), flush=True)
    done = subprocess.run(command, timeout=RUN_MAX_S + RUN_SLACK_S)
    if done.returncode not in ENDED or not (folder / "summary.json").exists():
        raise subprocess.CalledProcessError(done.returncode, command)
    return folder


def rows_of(part: Part, finished: Finished) -> Iterator[Row]:
    """The worst of the seeds against the goal, and what the runs took."""
    entry, summaries = finished.entry, finished.summaries
    success = min(summary["success"] or 0.0 for summary in summaries)
    longest = max(summary["training_s"] for summary in summaries)
    worst = f"worst of {len(summaries)} seeds"
    yield at_least(part.goal, f"{entry.name}: success, {worst}", success, entry.success)
    if entry.seconds is not None:
        yield at_most(part.goal, f"{entry.name}: training time, {worst}", "s", longest, entry.seconds)
    [variant] = read_variants(finished.runs) if len(finished.runs) == 1 else _one_variant(finished.runs)
    reached = variant.as_json(0.9)["reached"]
    for name, unit in (("training_s", "s"), ("episodes", "episodes"), ("updates", "updates")):
        if reached[name]:
            note = f"{reached['runs']} of {len(finished.runs)} seeds"
            figure = float(sorted(reached[name])[len(reached[name]) // 2])
            yield Row(part.goal, f"{entry.name}: {name} to 90%", unit, figure, note=note)
    for name, unit in (("env_steps", "steps"), ("updates", "updates"), ("successes_per_hour", "1/h")):
        figures = sorted(summary[name] or 0.0 for summary in summaries)
        yield Row(part.goal, f"{entry.name}: {name}, median", unit, float(figures[len(figures) // 2]))


def _one_variant(runs: Sequence[Path]) -> list[Variant]:
    """The runs as one variant, also if they differ in what they started from."""
    found = read_variants(runs)
    return [Variant(found[0].name, tuple(run for each in found for run in each.runs))]


def state_peers(panda: Finished, quick: bool) -> Iterator[Row]:
    """Seconds until each peer was done by the demo's rule on the first seed; how far it came, if it was not."""
    summary, config = panda.summaries[0], ROOT / "configs" / panda.entry.config
    limit_s, seed = (15.0 if quick else PEER_LIMIT_S), int(summary["seed"])
    steps_per_update = summary["env_steps"] / max(1, summary["updates"])
    found: dict[str, float | str] = {"plain loop": learning_checks.plain_s(config, seed, steps_per_update, limit_s)}
    peer = peers.start("sb3_sac", config, seed, limit_s)
    if isinstance(peer, str):
        found["Stable-Baselines3's SAC"] = peer
    else:
        with peer:
            seconds = peer.round(limit_s + RUN_SLACK_S)
            found["Stable-Baselines3's SAC"] = seconds if seconds > 0 else f"at the limit, {peer.last_line}"
    ours = float(summary["training_s"])
    measured = [figure for figure in found.values() if not isinstance(figure, str)]
    fastest = min(measured, default=None)
    ratio = None if fastest is None else fastest / max(ours, 1e-9)
    met = None if ratio is None else ratio >= 1.0
    yield Row(12, f"panda, seed {seed}: training next to peers", "s", ours, fastest, ratio, 1.0, met, found)


def gain_rows(runs: dict[str, Finished], name: str, base: str, gain: float) -> Iterator[Row]:
    """By how much `name` succeeds more often than `base`, in the mean of the seeds."""
    mine, theirs = (
        sum(each["success"] or 0.0 for each in runs[which].summaries) / len(runs[which].runs) for which in (name, base)
    )
    more = mine - theirs
    yield Row(12, f"{name}: success above {base}", "share", more, gain, more / gain, 1.0, more >= gain)


def asynchrony_rows(runs: dict[str, Finished]) -> Iterator[Row]:
    """Generation and updates an hour, asynchronous against synchronous; success no lower."""
    mine, theirs = (runs[name].summaries for name in ("asynchronous", "synchronous"))

    def per_hour(summaries: list[dict[str, Any]], count: str) -> float:
        return 3600 * sum(each[count] for each in summaries) / max(1e-9, sum(each["training_s"] for each in summaries))

    for name, count, target in (("generation", "env_steps", 1.5), ("updates", "updates", 5.0)):
        ours, bound = per_hour(mine, count), per_hour(theirs, count)
        ratio = ours / max(bound, 1e-9)
        yield Row(13, f"{name} an hour, bound: synchronous", "1/h", ours, bound, ratio, target, ratio >= target)
    ours, bound = (sum(each["success"] or 0.0 for each in which) / len(which) for which in (mine, theirs))
    met = ours >= bound
    yield Row(13, "success, bound: synchronous", "share", ours, bound, ours / max(bound, 1e-9), 1.0, met)


def scaling_rows(runs: dict[str, Finished]) -> Iterator[Row]:
    """How much sooner N robots reach 80% than one: at least 0.8 N."""
    seconds: dict[int, float] = {}
    for finished in runs.values():
        [variant] = _one_variant(finished.runs)
        reached = variant.as_json(0.8)["reached"]["training_s"]
        if len(reached) == len(finished.runs):
            seconds[int(finished.entry.name.rpartition("-")[2])] = sorted(reached)[len(reached) // 2]
    for robots, took in seconds.items():
        if robots > 1 and 1 in seconds:
            faster = seconds[1] / max(took, 1e-9)
            met = faster >= 0.8 * robots
            yield Row(14, f"{robots} robots: time to 80%; bound: one", "s", took, seconds[1], faster, 0.8 * robots, met)


def staying_rows(runs: Sequence[Path], quick: bool) -> Iterator[Row]:
    """Success after half an hour of training beyond the target, with a failure of a person marked as a success."""
    before, after = list[float](), list[float]()
    for folder in runs:
        summary = json.loads((folder / "summary.json").read_text())
        learning_checks.add_hand_driven(folder)
        until_s = summary["training_s"] + (10.0 if quick else BEYOND_S)
        options = (*ALWAYS[2:], ON_DROP, *_lasting(until_s), *(QUICK[3:] if quick else ()), "--any-result")
        subprocess.run(user_sys("train", "--resume", folder, *options), check=True, timeout=BEYOND_S + RUN_SLACK_S)
        before.append(summary["success"] or 0.0)
        after.append(json.loads((folder / "summary.json").read_text())["success"] or 0.0)
    worst, note = min(after), f"before: {min(before):.0%}"
    yield at_least(12, f"staying good: success, worst of {len(after)} seeds", worst, 0.95, note)


def run_part(name: str, seeds: Sequence[int], quick: bool, runs: Path) -> list[Row]:
    """Runs all of a part, draws its plot, and returns its rows."""
    part, finished, rows = PARTS[name], dict[str, Finished](), list[Row]()
    for entry in part.entries:
        overrides = part.quick if quick else ()
        folders = tuple(train(entry, seed, runs / name, overrides) for seed in seeds)
        finished[entry.name] = Finished(entry, folders)
        rows += rows_of(part, finished[entry.name])
    if part.check is not None:
        rows += part.check(finished, quick)
    drawn = [
        Variant(each.entry.name, tuple(run for variant in _one_variant(each.runs) for run in variant.runs))
        for each in finished.values()
    ]
    OUT.mkdir(exist_ok=True)
    draw_comparison(OUT / f"learning-{name}.png", drawn)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="such as 0,1,2")
    parser.add_argument("--quick", action="store_true", help="short runs, only to see whether they work")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    reduced = "short runs" if options.quick else "" if set(SEEDS) <= set(seeds) else f"seeds {options.seeds}"
    for name in options.parts or PARTS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="user-sys-learning-") as temporary:
            rows = run_part(name, seeds, options.quick, options.runs or Path(temporary))
        report(f"learning-{name}", rows, reduced=reduced)
        print(f"{name}: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
