"""`enable(max_regret=...)`: a demand that is checked, holds until `disable`, and nests."""

from __future__ import annotations

import pytest

import confpred
from confpred.errors import InvalidInput
from confpred.pytorch import choosing
from confpred.pytorch.switch import is_enabled


def test_it_holds_until_it_is_undone() -> None:
    assert choosing._max_regret is None
    with confpred.enabled(max_regret=1.1):
        assert choosing._max_regret == 1.1
        with confpred.enabled():
            assert choosing._max_regret is None
        assert choosing._max_regret == 1.1
    assert choosing._max_regret is None


@pytest.mark.parametrize("value", [0.9, "1.1", True, float("nan")])
def test_only_factors_are_accepted(value: object) -> None:
    with pytest.raises(InvalidInput, match="max_regret"):
        confpred.enable(max_regret=value)
    assert not is_enabled()
