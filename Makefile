# Two commands: `make train` and `make test`. Both build .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
CONFIG := configs/quickstart.json
CORPUS := prepared/python-stdlib

.PHONY: setup setup-test train test

setup: .venv/installed
setup-test: .venv/installed-test

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	touch $@

.venv/installed-test: requirements-dev.txt .venv/installed
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	touch $@

prepared/python-stdlib.model: .venv/installed
	$(BIN)/python -m data.tokenizer train --source python-stdlib --vocab-size 4096 --output $@

$(CORPUS)/manifest.json: prepared/python-stdlib.model
	$(BIN)/python -m data.prepare --source python-stdlib --tokenizer $< --output $(CORPUS) \
		--validation-fraction 0.05 --workers 2

train: $(CORPUS)/manifest.json
	$(BIN)/python train.py --config $(CONFIG)
	@echo; echo "A sample of what the model writes after 'def ':"; echo
	$(BIN)/python -m training.generate --checkpoint runs/quickstart --prompt "def "

test: .venv/installed-test
	$(BIN)/python -m pytest
