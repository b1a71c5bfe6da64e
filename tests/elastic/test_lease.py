"""One leader at a time, by files that all slots see."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nereus_jax.core.errors import ConfigError
from nereus_jax.elastic.lease import Lease, beat, claim, finish, read_lease


def test_a_term_is_claimed_once(tmp_path: Path) -> None:
    assert read_lease(tmp_path) is None
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: claim(tmp_path, 1, f"host{i}:1"), range(8)))
    assert won.count(True) == 1
    lease = read_lease(tmp_path)
    assert lease is not None and (lease.term, lease.address, lease.code) == (
        1,
        f"host{won.index(True)}:1",
        None,
    )


def test_a_leader_sees_that_another_one_has_taken_over(tmp_path: Path) -> None:
    assert claim(tmp_path, 1, "a:1") and beat(tmp_path, 1)
    before = read_lease(tmp_path)
    assert beat(tmp_path, 1)
    assert read_lease(tmp_path) != before  # a beat shows
    assert claim(tmp_path, 2, "b:1")
    assert not beat(tmp_path, 1) and beat(tmp_path, 2)
    assert [p.name for p in (tmp_path / "elastic").iterdir()] == ["term-000002.json"]


def test_the_end_of_a_job_is_written_down(tmp_path: Path) -> None:
    assert claim(tmp_path, 3, "a:1")
    finish(tmp_path, Lease(term=3, address="a:1"), 2)
    lease = read_lease(tmp_path)
    assert lease is not None and lease.code == 2


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/elastic, where the leader"):
        claim(tmp_path / "file", 1, "a:1")
