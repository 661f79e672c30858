"""One value names a way to compute a problem, whoever computes it."""

from __future__ import annotations

import pytest

from confpred.families.protocol import ABSENT, PYTORCH, PYTORCH_OPERATOR, Candidate
from confpred.families.registry import all_families, config_ids, config_of, config_words


def test_pytorchs_operator_is_a_candidate_like_others() -> None:
    assert PYTORCH_OPERATOR.provider == PYTORCH
    assert PYTORCH not in all_families()
    assert config_of(PYTORCH_OPERATOR) == {}
    assert config_words(PYTORCH_OPERATOR) == ""
    assert config_ids(PYTORCH) == {"": PYTORCH_OPERATOR.config_id}


@pytest.mark.parametrize("name", all_families())
def test_words_name_each_config_of_a_family(name: str) -> None:
    configs = all_families()[name].configs
    ids = config_ids(name)
    assert list(ids.values()) == list(range(len(configs)))
    last = Candidate(name, len(configs) - 1)
    config = {field: configs[field][-1] for field in configs.dtype.names}
    config = {field: value for field, value in config.items() if value != ABSENT}
    assert config_of(last) == config
    assert config_words(last) == " ".join(f"{field}={value}" for field, value in config.items())
