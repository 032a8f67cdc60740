# Every target does its own set-up; a second run starts at once. `make` alone lists the targets.
SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Without cached bytecode, each of the hundreds of processes of a test run compiles all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
RUN_EXTRAS := edge,sim,learner,interchange
DEMO ?= full
ARGS ?=
WORKERS ?= auto
IN_PARALLEL := -n $(WORKERS) --dist loadgroup
FUZZ_S ?= 600
CHAOS_TUNNEL := tests/tunnel/test_chaos.py tests/tunnel/test_crashes.py tests/tunnel/test_hostile_peers.py
DEMO_CONFIG_full := configs/demo.yaml
DEMO_CONFIG_smoke := configs/demo-smoke.yaml
PIXELS_CONFIG_full := configs/demo-pixels.yaml
PIXELS_CONFIG_smoke := configs/demo-pixels-smoke.yaml
VLA_CONFIG_full := configs/demo-vla.yaml
VLA_CONFIG_smoke := configs/demo-vla-smoke.yaml
ifeq ($(DEMO_CONFIG_$(DEMO)),)
  $(error DEMO is '$(DEMO)'; it can be full or smoke)
endif

INSTALLED_RUN := .venv/.installed-run
INSTALLED_DEV := .venv/.installed-dev
INSTALLED_LEROBOT := .venv-lerobot/.installed
INSTALLED_NEW_LEROBOT := .venv-lerobot-new/.installed
LEROBOT_POLICIES := tests/policies/test_lerobot_policies.py tests/policies/test_timm_backbone.py
INSTALLED_FRANKA := .venv-franka/.installed
INSTALLED_ROS2 := .venv-ros2/.installed
INSTALLED_BENCH := .venv-bench/.installed
PINS := pyproject.toml constraints.txt .ci/set-up

.PHONY: changes docs docs-pictures docs-settings help demo demo-pixels demo-vla test test-all test-browser test-slow test-backup observe images-test test-upgrade soak test-explore test-gpu chaos-store chaos-tunnel fuzz test-lerobot test-franka test-ros2 test-fleet lint format types bench bench-keep bench-docs bench-store bench-tunnel bench-weights bench-hal bench-console bench-delay bench-learning bench-interventions bench-gpu bench-vla wheel release-check setup clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED_RUN)  ## a simulated arm learns to lift a cube, while you watch (DEMO=smoke: a short form; ARGS=--seed=1)
	@.ci/check-egl
	@$(BIN)/user-sys train $(DEMO_CONFIG_$(DEMO)) $(ARGS)

demo-pixels: $(INSTALLED_RUN)  ## the same arm learns from its two cameras (DEMO=smoke: a short form; ARGS=--seed=1)
	@.ci/check-egl
	@$(BIN)/user-sys train $(PIXELS_CONFIG_$(DEMO)) $(ARGS)

demo-vla: $(INSTALLED_RUN)  ## one policy learns four tasks by their sentences, and from your corrections (DEMO=smoke: a short form)
	@.ci/check-egl
	@$(BIN)/user-sys train $(VLA_CONFIG_$(DEMO)) $(ARGS)

test: $(INSTALLED_DEV)  ## the default tests, in parallel: no GPU, no network, no hardware (ARGS=-x, WORKERS=3)
	@.ci/check-egl
	@[ -d tests/__pycache__ ] || printf '%s\n' tests/*/ tests/test_*.py | xargs -P 2 -n 11 $(BIN)/pytest --collect-only >/dev/null 2>&1 || true  # compiles the tests once, not in each worker
	$(BIN)/pytest $(IN_PARALLEL) $(ARGS)

test-all:  ## the default tests and all that they leave out, each in its environment, with a summary
	@.ci/test-all $(ARGS)

test-slow: $(INSTALLED_DEV)  ## the long variants: faults by the thousand, whole runs
	@.ci/check-egl
	$(BIN)/pytest -m 'slow and not gpu' -n 2 --dist loadgroup --timeout 1800 $(ARGS)

test-browser: $(INSTALLED_DEV)  ## the console in a real Chromium, and a run that a person drives; fails without Chromium
	NEEDS_CHROMIUM=1 $(BIN)/pytest -m browser --timeout 1800 tests/console tests/test_person.py $(ARGS)

docs-pictures: $(INSTALLED_DEV)  ## the console's pictures of docs/images, by the run of test-browser
	CONSOLE_SHOTS=docs/images NEEDS_CHROMIUM=1 $(BIN)/pytest -m browser --timeout 1800 tests/test_person.py $(ARGS)

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

observe: $(INSTALLED_DEV)  ## a real Prometheus scrapes a run whose gateway is killed; needs Debian's package prometheus
	$(BIN)/python tests/observe.py

test-upgrade: $(INSTALLED_DEV)  ## robots run the wheel of an earlier commit while their cloud is replaced (ARGS="--wheel-of TAG")
	$(BIN)/python tests/upgrade.py $(ARGS)

images-test: $(INSTALLED_DEV)  ## the images' steps and programs without an engine; needs root, mmdebstrap, package indexes
	$(BIN)/python tests/images.py $(ARGS)

soak: $(INSTALLED_DEV)  ## eight robots for an hour while people help and processes die (ARGS=--quick: three minutes)
	$(BIN)/python tests/soak.py --report docs/soak.md $(ARGS)

test-backup: $(INSTALLED_DEV)  ## backups to a folder and to an S3 server, with 200 kills of writer and backup
	$(BIN)/pytest -m 'slow or not slow' --timeout 1800 tests/store/test_backup.py $(ARGS)

test-lerobot: $(INSTALLED_DEV) $(INSTALLED_LEROBOT)  ## with LeRobot itself: data sets both ways, its RTC; its robots and policies, in its environments (0.6: with Python 3.12)
	$(BIN)/pytest -m lerobot tests/interchange tests/policies $(ARGS)
	HF_HUB_OFFLINE=1 .venv-lerobot/bin/python -m pytest -m 'lerobot and not slow' tests/robots $(LEROBOT_POLICIES) $(ARGS)
	@if $(MAKE) --no-print-directory $(INSTALLED_NEW_LEROBOT); then \
	  HF_HUB_OFFLINE=1 .venv-lerobot-new/bin/python -m pytest -m 'lerobot and not slow' $(LEROBOT_POLICIES) $(ARGS); \
	else echo 'LeRobot 0.6, and with it pi0, was not tested: see above'; fi

test-franka: $(INSTALLED_FRANKA)  ## the Franka driver with franky itself, on a simulation of the arm's protocol by others
	.venv-franka/bin/python -m pytest -m franka tests/robots/test_franka.py $(ARGS)

test-ros2: $(INSTALLED_ROS2)  ## with ROS 2 itself: our driver, a simulated ros2_control, and another DDS
	.venv-ros2/bin/python -m pytest -m ros2 tests/robots $(ARGS)

test-fleet: $(INSTALLED_DEV) $(INSTALLED_LEROBOT) $(INSTALLED_ROS2)  ## four unlike robots in one job, on two Ray nodes and two robots' computers
	$(BIN)/pytest -m fleet --timeout 3600 tests/robots/test_fleet_of_four.py $(ARGS)

lint: $(INSTALLED_DEV)  ## ruff: rules and format; the Dockerfile, compose files and forms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint --config docker/hadolint.yaml docker/Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker/compose*.yaml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff

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

bench-console: $(INSTALLED_DEV)  ## a person's input, the e-stop, and the robot's state on the page (ARGS=--quick)
	$(BIN)/python -m benchmarks console estop $(ARGS)

bench-gpu: $(INSTALLED_DEV)  ## what needs a GPU: weight pushes, a learner on pictures, large policies: 10 minutes (ARGS=--quick)
	@$(BIN)/python -c "import sys, torch; '--quick' in sys.argv or torch.cuda.is_available() or sys.exit('make bench-gpu measures a GPU, and torch finds none here; ARGS=--quick tries the code on the CPU')" $(ARGS)
	$(BIN)/python -m benchmarks gpu_push gpu_learning gpu_vla $(ARGS)

bench-delay: $(INSTALLED_DEV)  ## execution methods of action chunks under delays of the policy (ARGS="--tasks lift --episodes 20")
	@.ci/check-egl
	$(BIN)/python -m benchmarks.delay $(ARGS)

bench-learning: $(INSTALLED_DEV) $(INSTALLED_BENCH)  ## how well and how fast policies learn: hours (ARGS="pixels peg --seeds 0,1", ARGS=--quick)
	@.ci/check-egl
	$(BIN)/python -m benchmarks.learning $(ARGS)

bench-interventions: $(INSTALLED_DEV)  ## a scripted operator corrects a policy at the console, by HG-DAgger and RaC: 10 minutes (ARGS=--quick)
	@.ci/check-egl
	$(BIN)/python -m benchmarks interventions $(ARGS)

bench-vla: $(INSTALLED_DEV)  ## a vision-language-action policy on four sentences: hours (ARGS="start language --runs DIR --seeds 0", ARGS=--quick)
	@.ci/check-egl
	$(BIN)/python -m benchmarks.vla $(ARGS)

docs: $(INSTALLED_DEV)  ## the documentation as a site in build/site; links and anchors are checked
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(CURDIR) $(BIN)/mkdocs build --strict --quiet

docs-settings: $(INSTALLED_DEV)  ## make the list of docs/settings.md from the typed settings
	$(BIN)/python tests/tools/settings_page.py

changes: $(INSTALLED_DEV)  ## what the next version adds: CHANGELOG.md as it will be
	@$(BIN)/towncrier build --draft --version next

wheel: $(INSTALLED_DEV)  ## build the wheel and try it outside the checkout, with what a robot's computer has
	$(BIN)/python tests/smoke_wheel.py

release-check: $(INSTALLED_DEV)  ## the wheel twice with equal SHA-256, tests on each Python, licences, components, audit (ARGS="--offline --no-tests")
	@.ci/release-check $(ARGS)

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

$(INSTALLED_NEW_LEROBOT): pyproject.toml .ci/set-up
	@.ci/set-up --lerobot-new
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
	@.ci/set-up $(RUN_EXTRAS),backup,lora,dev
	@touch $@ $(INSTALLED_RUN)
