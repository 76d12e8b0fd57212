# Two commands do everything on a fresh Linux machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# the same find-links setting for pip and uv: where it offers a CPU build of torch, that build is taken
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# compiled modules are kept: workers and the processes that tests start would each compile all their imports anew
unexport PYTHONDONTWRITEBYTECODE
RUN := outputs/quickstart/default
DENSE := outputs/quickstart/dense
NATTEN := natten==0.21.7
SCORE := --guidance 3 --steps 20

# one thread for each worker, more would wait for each other; three workers keep two cores busy, because many tests wait
# for processes or timeouts
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal
# triton decides when it is imported whether its kernels are interpreted; these tests wait for nothing, and every worker
# costs its imports
INTERPRETED := TRITON_INTERPRET=1 $(PYTEST) -n 2 tests/kernels -k "triton or coarse_fine or interpreter"

.PHONY: demo compare test test-all natten wheel soak docs lint clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv || echo "uv is not available, using pip"
	if test -x $(BIN)/uv; then VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q -e '.[dev]'; \
	else $(BIN)/python -m pip install -q -e '.[dev]'; fi
	touch $(STAMP)

# the main job: video files -> latent shards -> sparse training -> sampled and scored videos
demo: $(STAMP)
	test -f data/toy/videos/captions.jsonl || $(BIN)/vsa toy data/toy/videos
	test -f data/toy/shards/index.json || $(BIN)/vsa encode data/toy/videos data/toy/shards --codec haar --text ngrams
	$(BIN)/vsa train experiment=quickstart overwrite=true
	$(BIN)/python -m benchmarks.toy.score $(RUN) $(SCORE) --min-colour 0.9 --min-direction 0.5
	$(BIN)/vsa report $(RUN)

# dense attention at the same training FLOPs, beside the sparse run of `make demo`
compare: $(STAMP)
	test -f $(RUN)/score.json || $(MAKE) demo
	$(BIN)/python -m benchmarks.toy.compare $(RUN) $(DENSE)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	test ! -x $(BIN)/hadolint || $(BIN)/hadolint Dockerfile

# every check that fits in ten minutes on two cores
test: lint
	$(PYTEST) -m "not slow"
	$(INTERPRETED) -m "not slow"

# masks and outputs are compared with NATTEN's, which builds against the installed torch
natten: $(STAMP)
	@$(BIN)/python -m pip install -q wheel >/dev/null 2>&1 \
	&& $(BIN)/python -m pip install -q --no-build-isolation --no-deps $(NATTEN) >/dev/null 2>&1 \
	|| echo "$(NATTEN) could not be installed, its tests are skipped"

# the longer forms too
test-all: lint natten
	GATES=all $(PYTEST)
	$(INTERPRETED)

# what users install: the wheel alone, three training steps outside the checkout, at the oldest versions it admits
wheel:
	scripts/check_wheel.sh lowest-direct

# every fault of the reliability scorecard, provoked many times: under an hour on two cores
soak: $(STAMP)
	$(PYTEST) -m "soak and not gpu" --attempts full --ignore tests/kernels/test_triton_fuzz.py
	$(INTERPRETED) -m "soak and not gpu" --attempts full --table outputs/soak-kernels.json

# the pages of docs/ with a configuration reference, as files to open from the disk; a warning is an error
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open build/site/index.html, or serve it with: $(BIN)/python -m http.server -d build/site"

clean:
	rm -rf outputs data build/site
