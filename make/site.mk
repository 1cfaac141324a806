# The site: pages of docs/ and an API reference, in an environment of its own. Included by the Makefile.
.PHONY: site

DOCS_VENV := .venv-docs
DOCS_BIN := $(DOCS_VENV)/bin
SITE := build/site

site: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --quiet --strict
	$(DOCS_BIN)/python tools/check_site.py $(SITE)
	@echo "open $(SITE)/index.html"

# The extra `docs` without the package and its torch: docstrings are read, not run.
$(DOCS_VENV)/.ready: make/site.mk pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_BIN)/python -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(DOCS_VENV)/needed.txt
	$(DOCS_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--requirement $(DOCS_VENV)/needed.txt
	touch $@
