"""Who waits for whom is followed to the rank that keeps all waiting."""

from penstock.runtime.processes.heartbeat import Position, chain, circle


def waits(what: str, peer: int, meeting: str = "", phase: str = "takes a step") -> Position:
    return Position(7, phase, "", what, peer, meeting, since_s=1.0, waited_s=50.0)


BUSY = Position(7, "takes a step after batch 4", "F5 of stage 1")


def test_a_chain_ends_at_the_rank_that_does_not_answer() -> None:
    positions = {
        3: waits("F5 from stage 2 (rank 2)", 2),
        2: waits("F5 from stage 1 (rank 1)", 1),
        1: BUSY,
        0: waits("B5 from stage 1 (rank 1)", 1),
    }
    assert chain(3, positions, {1: 41.0}) == (
        "rank 2 (takes a step; has waited 50 s for F5 from stage 1 (rank 1)), which waits for "
        "rank 1, which has not answered for 41 s: its process is stopped, dead or hangs in a call "
        "(last heard of: takes a step after batch 4, F5 of stage 1)"
    )


def test_a_rank_that_computes_or_has_not_joined_is_the_end_of_a_chain() -> None:
    positions = {0: waits("F0 from stage 1 (rank 1)", 1), 1: BUSY}
    assert chain(0, positions, {}) == (
        "rank 1 does not wait: it takes a step after batch 4, F5 of stage 1"
    )
    positions = {0: waits("all ranks", -1, "the start"), 1: None}
    assert chain(0, positions, {}) == "rank 1 has not joined the run"


def test_in_a_meeting_a_rank_waits_for_those_that_are_elsewhere() -> None:
    meeting = waits("all ranks", -1, "exchange 4", "saves a checkpoint")
    positions = {0: meeting, 1: meeting, 2: BUSY}
    assert chain(0, positions, {}).startswith("rank 2 does not wait")
    assert chain(0, {0: meeting, 1: meeting}, {}) == ""


def test_an_operation_that_does_not_say_for_whom_it_waits_is_explained_by_silence() -> None:
    positions = {0: waits("a sum", -1), 1: waits("a sum", -1), 2: BUSY}
    assert chain(0, positions, {}) == ""
    assert chain(0, positions, {2: 9.0}).startswith("rank 2 has not answered for 9 s")


def test_only_ranks_in_an_exchange_and_in_a_step_wait_for_one_another_for_ever() -> None:
    meeting = waits("all ranks", -1, "exchange 4", "saves a checkpoint")
    in_step = {0: waits("B0 from stage 1 (rank 1)", 1), 2: waits("B0 from stage 0 (rank 0)", 0)}
    assert circle({**in_step, 1: meeting}) == (1, 0)
    assert circle({**in_step, 1: BUSY}) == ()
    assert circle({**in_step, 1: waits("F1 from stage 0 (rank 0)", 0)}) == ()  # under way
    assert circle({0: meeting, 1: meeting, 2: BUSY}) == ()
