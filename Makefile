PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: setup demo test test-gpu lint bench results docs clean

setup: $(READY)

# Everything that demo, test and lint need; made again when what it is made from changes.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plot,test,lint]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/parity/demo.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# On a machine with a GPU, with the python that has torch, Triton, pytest and hypothesis there.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/test_gpu.py tests/test_ensemble_gpu.py tests/test_stacks_gpu.py tests/test_tasks.py tests/test_bench.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

bench: $(READY)
	$(BIN)/pondertime bench

# The figures and the page of the paper's claims, from the tables in results/; figures without results are left out.
results: $(READY)
	-$(BIN)/pondertime figures --out docs/images
	for grid in parity/first-weights parity/tau-warmup logic/20-seeds addition/three-digits; do for figure in bar plot difficulty; do \
		$(BIN)/pondertime figures --only $${grid%/*}_$$figure --results results/$${grid#*/} --out docs/images/$${grid#*/} \
		|| true; done; done
	$(BIN)/python -m pondertime.claims --out docs/results.md

docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/sphinx-build -W -q docs docs/_build/html
	@echo docs/_build/html/index.html

clean:
	rm -rf .venv build dist docs/_build .pytest_cache .ruff_cache .hypothesis
