# Every target does its own set-up; a second run starts at once. `make` alone lists the targets.
SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
RUN_EXTRAS := edge,sim,learner,interchange
DEMO ?= full
ARGS ?=
WORKERS ?= auto
IN_PARALLEL := -n $(WORKERS) --dist loadgroup
FUZZ_S ?= 600
CHAOS_TUNNEL := tests/tunnel/test_simulation.py tests/tunnel/test_chaos.py tests/tunnel/test_crashes.py tests/tunnel/test_hostile_peers.py
DEMO_CONFIG_full := configs/demo.yaml
DEMO_CONFIG_smoke := configs/demo-smoke.yaml
ifeq ($(DEMO_CONFIG_$(DEMO)),)
  $(error DEMO is '$(DEMO)'; it can be full or smoke)
endif

INSTALLED_RUN := .venv/.installed-run
INSTALLED_DEV := .venv/.installed-dev
INSTALLED_LEROBOT := .venv-lerobot/.installed
INSTALLED_FRANKA := .venv-franka/.installed
INSTALLED_ROS2 := .venv-ros2/.installed
INSTALLED_BENCH := .venv-bench/.installed
PINS := pyproject.toml constraints.txt .ci/set-up

.PHONY: docs-settings help demo test test-all test-slow test-explore test-gpu chaos-store chaos-tunnel fuzz test-lerobot test-franka test-ros2 test-fleet lint format types bench bench-keep bench-docs bench-store bench-tunnel bench-weights bench-hal wheel setup clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED_RUN)  ## a simulated arm learns to lift a cube, while you watch (DEMO=smoke: a short form; ARGS=--seed=1)
	@.ci/check-egl
	@$(BIN)/user-sys train $(DEMO_CONFIG_$(DEMO)) $(ARGS)

test: $(INSTALLED_DEV)  ## the default tests, in parallel: no GPU, no network, no hardware (ARGS=-x, WORKERS=3)
	@.ci/check-egl
	$(BIN)/pytest $(IN_PARALLEL) $(ARGS)

test-all:  ## the default tests and all that they leave out, each in its environment, with a summary
	@.ci/test-all $(ARGS)

test-slow: $(INSTALLED_DEV)  ## the long variants: faults by the thousand, whole runs
	@.ci/check-egl
	$(BIN)/pytest -m 'slow and not gpu' --timeout 1800 $(ARGS)

test-explore: $(INSTALLED_DEV)  ## the property tests with other examples at each run, and more of them
	$(BIN)/pytest $(IN_PARALLEL) -m 'hypothesis and not (gpu or hardware or ros2 or lerobot or franka or fleet or slow)' --hypothesis-profile=explore $(ARGS)

test-gpu: $(INSTALLED_DEV)  ## the tests that need a GPU
	$(BIN)/pytest -m gpu --timeout 1800 $(ARGS)

chaos-tunnel: $(INSTALLED_DEV)  ## the tunnel behind a network that does its worst, and among hostile peers: an hour
	$(BIN)/pytest -m 'slow or not slow' --timeout 3600 $(CHAOS_TUNNEL) $(ARGS)

fuzz: $(INSTALLED_DEV)  ## every parser against atheris, FUZZ_S=600 seconds each, one on each processor
	$(BIN)/python tests/fuzz/fuzz_all.py $(FUZZ_S) $(ARGS)

chaos-store: $(INSTALLED_DEV)  ## kill, fill up, damage and cut off an experience store, by the ten thousand (ARGS=--quick)
	cd tests/store && PYTHONPATH=$(CURDIR) $(abspath $(BIN))/python -W ignore chaos.py $(ARGS)

test-lerobot: $(INSTALLED_DEV) $(INSTALLED_LEROBOT)  ## with LeRobot itself: data sets both ways; its robots, by our driver, in its environment
	$(BIN)/pytest -m lerobot tests/interchange $(ARGS)
	HF_HUB_OFFLINE=1 .venv-lerobot/bin/python -m pytest -m lerobot tests/robots $(ARGS)

test-franka: $(INSTALLED_FRANKA)  ## the Franka driver with franky itself, on a simulation of the arm's protocol by others
	.venv-franka/bin/python -m pytest -m franka tests/robots/test_franka.py $(ARGS)

test-ros2: $(INSTALLED_ROS2)  ## with ROS 2 itself: our driver, a simulated ros2_control, and another DDS
	.venv-ros2/bin/python -m pytest -m ros2 tests/robots $(ARGS)

test-fleet: $(INSTALLED_DEV) $(INSTALLED_LEROBOT) $(INSTALLED_ROS2)  ## four unlike robots in one job, on two Ray nodes and two robots' computers
	$(BIN)/pytest -m fleet --timeout 3600 tests/robots/test_fleet_of_four.py $(ARGS)

lint: $(INSTALLED_DEV)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED_DEV)  ## mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED_DEV)  ## mypy, strict
	$(BIN)/mypy

bench: $(INSTALLED_DEV) $(INSTALLED_BENCH)  ## every benchmark, one after the other, with a summary (ARGS="--quick": do they work? ARGS="store tunnel": these)
	@.ci/check-egl
	$(BIN)/python -m benchmarks $(ARGS)

bench-keep: $(INSTALLED_DEV)  ## take results over from benchmarks/out/ into benchmarks/results/ and docs/benchmarks.md (ARGS="store tunnel")
	$(BIN)/python -m benchmarks.page --keep $(ARGS)

bench-docs: $(INSTALLED_DEV)  ## make docs/benchmarks.md from benchmarks/results/
	$(BIN)/python -m benchmarks.page

bench-weights: $(INSTALLED_DEV)  ## weight pushes alone (ARGS=--quick)
	$(BIN)/python -m benchmarks weights $(ARGS)

bench-store: $(INSTALLED_DEV) $(INSTALLED_BENCH)  ## the experience store and the replay buffer beside their bounds and peers
	$(BIN)/python -m benchmarks store replay million $(ARGS)

bench-tunnel: $(INSTALLED_DEV)  ## the tunnel beside its bounds and peers, and control at 100 Hz under its load
	$(BIN)/python -m benchmarks tunnel sites control $(ARGS)

bench-hal: $(INSTALLED_DEV)  ## a million hostile actions, the safety kernel's cost, and how soon a robot is safe (ARGS=--quick)
	$(BIN)/python -m benchmarks hal faults-ur faults-lerobot faults-ros2 faults-franka $(ARGS)

docs-settings: $(INSTALLED_DEV)  ## make the list of docs/settings.md from the typed settings
	$(BIN)/python tests/tools/settings_page.py

wheel: $(INSTALLED_DEV)  ## build the wheel and try it outside the checkout, with what a robot's computer has
	$(BIN)/python tests/smoke_wheel.py

setup: $(INSTALLED_DEV)  ## the environment in .venv, with the tools for development

clean:  ## remove what was built and cached; runs/ and .venv/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis benchmarks/out
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

$(INSTALLED_RUN): $(PINS)
	@.ci/set-up $(RUN_EXTRAS)
	@touch $@

$(INSTALLED_LEROBOT): pyproject.toml .ci/set-up .ci/lerobot-overrides constraints-lerobot.txt
	@.ci/set-up --lerobot
	@touch $@

$(INSTALLED_FRANKA): pyproject.toml .ci/set-up
	@.ci/set-up --franka
	@touch $@

$(INSTALLED_ROS2): pyproject.toml .ci/set-up $(wildcard tests/robots/ros2_interfaces/*)
	@.ci/set-up --ros2
	@touch $@

# Without the peers the benchmarks run all the same, and say which are missing.
$(INSTALLED_BENCH): .ci/set-up
	@.ci/set-up --bench && touch $@ || echo "the peers of the store and of the demo cannot be installed here; going on without them"

$(INSTALLED_DEV): $(PINS)
	@.ci/set-up $(RUN_EXTRAS),dev
	@touch $@ $(INSTALLED_RUN)
