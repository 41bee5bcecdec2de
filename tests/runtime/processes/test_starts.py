"""Each start of the ranks over one store gets a name of its own, whatever earlier ones left."""

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import distributed

from penstock.errors import Stalled
from penstock.runtime.processes.store import RunStore, name_of_start, tell_start

RANKS = 4
LIMIT_S = 60.0


@pytest.fixture
def store() -> Any:
    """The store of an agent, which outlives the ranks that it starts."""
    return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def names(store: Any, ranks: Sequence[int], limit_s: float = LIMIT_S) -> list[str]:
    """The names that these ranks find, each over a connection of its own."""

    def name_of(rank: int) -> str:
        own = RunStore(store.clone())
        if rank:
            return name_of_start(own, rank, limit_s)
        name = secrets.token_hex(8)
        tell_start(own, name, RANKS)
        return name

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(name_of, ranks))


def test_ranks_of_a_start_agree_and_no_two_starts_do(store: Any) -> None:
    starts = [names(store, range(RANKS)) for _ in range(3)]
    assert [len(set(start)) for start in starts] == [1, 1, 1]
    assert len({start[0] for start in starts}) == 3


def test_a_rank_that_asked_before_the_others_came_confuses_nobody(store: Any) -> None:
    """It has ended; the rank of the next start asks again, with another number."""
    with pytest.raises(Stalled, match=r"rank 2 waited 0.2 s for rank 0 to join the run"):
        names(store, [2], limit_s=0.2)
    assert len(set(names(store, range(RANKS)))) == 1


def test_values_of_an_earlier_start_are_not_seen(store: Any) -> None:
    starts = [names(store, range(RANKS))[0] for _ in "12"]
    before, after = (RunStore(distributed.PrefixStore(name, store)) for name in starts)  # type: ignore[attr-defined]
    before.set("abort", "rank 1: its memory ran out")
    before.add("joined", 1)
    assert before.get("abort") == before.clone().get("abort") == b"rank 1: its memory ran out"
    assert not after.check(["abort"])
    assert after.add("joined", 1) == 1
    assert after.compare_set("abort", "", "rank 2: another cause") == b"rank 2: another cause"
    assert before.delete_key("abort")
    assert after.check(["abort"])
