"""tests/mutations.toml is up to date: each line that it makes wrong is there once, and so are the tests that see it."""

import ast

import pytest
from mutate import ROOT, mutations

TABLE = mutations()


@pytest.mark.parametrize("name", TABLE)
def test_a_mutation_can_be_made(name):
    mutation = TABLE[name]
    former = (ROOT / mutation.file).read_text()
    assert ast.dump(ast.parse(mutation.text(ROOT))) != ast.dump(ast.parse(former))
    assert mutation.tests and all((ROOT / test).exists() for test in mutation.tests)
