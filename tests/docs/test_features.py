"""The table of features in the README and on the page about moving is the one that is tried."""

from pathlib import Path

import pytest

from .features import FEATURES, has, LIBRARIES, table


ROOT = Path(__file__).parents[2]
every_feature = pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.check.__name__)


@pytest.mark.parametrize("name", ["eqx_torch", "pure_callback"])
@every_feature
def test_the_table_is_true(feature, name):
    assert has(LIBRARIES[name](), feature) == (name in feature.had_by)


@pytest.mark.parametrize("page", ["README.md", "docs/moving.md"])
def test_the_table_is_shown(page):
    assert table() in (ROOT / page).read_text()
