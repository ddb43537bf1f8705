# Two commands: `make train` and `make test`. Both build .venv first, once.
PYTHON ?= python3
# DeepSpeed looks for ninja and for its launcher's python on the PATH.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: setup corpus train test

setup: .venv/installed
corpus: prepared/python-stdlib/manifest.json

train: corpus
	python train.py --config configs/quickstart.json
	@echo && echo "What the model writes after 'def ':" && echo
	python -m training.generate --checkpoint runs/quickstart --prompt "def "

# Two tests at a time, one thread each: most wait for processes of their own.
test: .venv/installed-for-tests
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal $(ARGS)

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	python -m pip install --quiet --requirement requirements.txt
	touch $@

.venv/installed-for-tests: requirements-dev.txt .venv/installed
	python -m pip install --quiet --requirement requirements-dev.txt
	touch $@

# The text every machine has: the source of Python's standard library.
prepared/python-stdlib.model: | .venv/installed
	python -m data.tokenizer train --source python-stdlib --vocab-size 4096 --output $@

prepared/python-stdlib/manifest.json: | prepared/python-stdlib.model
	python -m data.prepare --source python-stdlib --tokenizer prepared/python-stdlib.model \
		--output prepared/python-stdlib --validation-fraction 0.05
