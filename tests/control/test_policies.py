"""Policies by name."""

import pytest

from nereus_jax.control.policies import POLICIES, Gain, Policy, parse_policy
from nereus_jax.core.errors import ConfigError


def test_names_give_policies():
    assert [parse_policy(name).name for name in POLICIES] == list(POLICIES)
    assert parse_policy("payback").gamma == 0.5 and parse_policy("payback=0.4").gamma == 0.4
    assert parse_policy("every_k").every == 3 and parse_policy("every_k(7)").every == 7
    assert parse_policy(" every_k = 2 ").every == 2
    assert parse_policy("dp_only").same_degrees and not parse_policy("any_gain").same_degrees
    assert not parse_policy("static").foresees and parse_policy("static").gain is Gain.NEVER


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pay-back",
            "policy 'pay-back' is not known; use one of static, dp_only, any_gain, every_k, "
            "payback",
        ),
        ("payback=1.5", r"policy payback: gamma must be in \[0, 1\], got 1.5"),
        ("payback=-0.1", r"gamma must be in \[0, 1\], got -0.1"),
        ("payback=nan", r"gamma must be in \[0, 1\], got nan"),
        ("payback=often", r"needs gamma in \[0, 1\], got 'often'"),
        ("every_k=0", "steps must be at least 1, got 0"),
        ("every_k=2.5", "needs a whole number of steps, got '2.5'"),
        ("static=3", "takes no number, got '3'; write static"),
    ],
)
def test_mistakes_are_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_policy(text)
    assert "\n" not in str(caught.value)


def test_gamma_is_checked_wherever_it_comes_from():
    with pytest.raises(ConfigError, match=r"gamma must be in \[0, 1\], got 2"):
        Policy(name="payback", gain=Gain.PAYBACK, gamma=2.0)
