"""tests/mutations.toml is up to date: each line that it makes wrong is there once, and so are the tests that see it."""

import ast
import os

import pytest
from mutate import ROOT, mutations, table

TABLE = mutations()


@pytest.mark.parametrize("name", TABLE)
def test_a_mutation_can_be_made(name):
    mutation = TABLE[name]
    former = (ROOT / mutation.file).read_text()
    assert ast.dump(ast.parse(mutation.text(ROOT))) != ast.dump(ast.parse(former))
    assert mutation.tests and all((ROOT / test).exists() for test in mutation.tests)


def test_the_page_has_the_table():
    """GOLDEN=write writes it."""
    page = ROOT / "docs" / "development.md"
    before, _, rest = page.read_text().partition("<!-- from tests/mutations.toml -->\n")
    after = rest.partition("<!-- end -->")[2]
    wanted = f"{before}<!-- from tests/mutations.toml -->\n{table()}\n<!-- end -->{after}"
    if os.environ.get("GOLDEN") == "write":
        page.write_text(wanted)
    assert page.read_text() == wanted
