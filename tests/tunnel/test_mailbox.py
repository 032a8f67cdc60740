"""The bounded queue in which state is coalesced."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from user_sys.tunnel.mailbox import Mailbox

ITEMS = st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers()), max_size=40)


@given(ITEMS, st.integers(1, 50))
def test_events_stay_in_order_states_are_the_newest_and_nothing_exceeds_the_bound(
    puts: list[tuple[str | None, int]], capacity: int
) -> None:
    box: Mailbox[tuple[str | None, int]] = Mailbox(capacity)
    expected: list[tuple[str | None, int]] = []
    for key, value in puts:
        expected = [item for item in expected if key is None or item[0] != key]
        accepted = box.put((key, value), key)
        assert accepted == (len(expected) < capacity)
        expected += [(key, value)] if accepted else []
        assert len(box) == len(expected) <= capacity
    assert [box.take() for _ in expected] == expected
    assert box.take() is None


def test_an_item_replaced_while_it_was_being_sent_is_not_taken_for_the_new_one() -> None:
    box: Mailbox[list[int]] = Mailbox(4)
    box.put([1], "state")
    sending = box.peek()
    box.put([2], "state")
    assert sending is not None
    box.discard(sending)
    assert box.take() == [2]


def test_wait_returns_what_another_thread_puts_and_gives_up_at_its_deadline() -> None:
    box: Mailbox[int] = Mailbox(4)
    assert box.wait(0.01) is None
    thread = threading.Thread(target=box.put, args=(7,))
    thread.start()
    assert box.wait(120) == 7
    thread.join()


def test_what_is_unwanted_is_dropped_and_counted() -> None:
    box: Mailbox[int] = Mailbox(2)
    assert box.put(1) and box.put(2) and not box.put(3)
    assert box.refused == 1
    assert box.drop(lambda item: item == 1) == 1
    assert box.take() == 2
