"""Circuits: closed, open, half-open with one probe."""

from __future__ import annotations

from kvbelay.core.circuit import Circuit, CircuitPolicy, CircuitState

POLICY = CircuitPolicy(failures=3, window_s=10.0, pause_s=1.0, pause_max_s=4.0)


def opened(at: float = 0.0) -> Circuit:
    """A circuit that opened at that time."""
    circuit = Circuit(POLICY)
    for _ in range(3):
        circuit.failed(at)
    return circuit


def test_enough_failures_in_the_window_open_it() -> None:
    """It opens at the last of the failures that the policy names, not one earlier."""
    circuit = Circuit(POLICY)
    circuit.failed(0.0)
    circuit.failed(5.0)
    assert circuit.state(5.0) is CircuitState.CLOSED
    assert circuit.admit(5.0)
    circuit.failed(10.0)
    assert circuit.state(10.0) is CircuitState.OPEN
    assert not circuit.admit(10.0)


def test_failures_outside_the_window_do_not_add_up() -> None:
    """Failures that lie further apart than the window leave it closed."""
    circuit = Circuit(POLICY)
    for at in (0.0, 6.0, 12.0, 18.0, 24.0):
        circuit.failed(at)
        assert circuit.state(at) is CircuitState.CLOSED


def test_misses_and_successes_do_not_open_it() -> None:
    """A child that answers, with or without the data, is healthy."""
    circuit = Circuit(POLICY)
    for _ in range(100):
        circuit.succeeded()
    assert circuit.admit(0.0)


def test_one_probe_and_no_more() -> None:
    """After the pause one attempt may start, and no other until it is known how that one ended."""
    circuit = opened()
    assert circuit.state(0.99) is CircuitState.OPEN
    assert circuit.state(1.0) is CircuitState.HALF_OPEN
    assert [circuit.admit(1.0) for _ in range(3)] == [True, False, False]


def test_a_probe_that_succeeds_closes_it() -> None:
    """After a good probe the child is asked as before, and needs the full number of failures to open again."""
    circuit = opened()
    assert circuit.admit(1.0)
    circuit.succeeded()
    assert circuit.state(1.0) is CircuitState.CLOSED
    circuit.failed(1.0)
    assert circuit.admit(1.0)


def test_a_probe_that_fails_doubles_the_pause() -> None:
    """Each failed probe opens it again for twice as long, up to the longest pause."""
    circuit = opened()
    at = 1.0
    for pause_s in (2.0, 4.0, 4.0):
        assert circuit.admit(at)
        circuit.failed(at)
        assert circuit.state(at + pause_s - 0.01) is CircuitState.OPEN
        at += pause_s
        assert circuit.state(at) is CircuitState.HALF_OPEN


def test_a_good_probe_forgets_the_long_pause() -> None:
    """After it has been closed, the next pause is the first one's length again."""
    circuit = opened()
    assert circuit.admit(1.0)
    circuit.failed(1.0)
    assert circuit.admit(3.0)
    circuit.succeeded()
    for _ in range(3):
        circuit.failed(10.0)
    assert circuit.state(11.0) is CircuitState.HALF_OPEN


def test_a_probe_that_is_called_off_lets_the_next_one_try() -> None:
    """A cancelled probe says nothing about the child, and does not block the next."""
    circuit = opened()
    assert circuit.admit(1.0)
    circuit.abandoned()
    assert circuit.state(1.0) is CircuitState.HALF_OPEN
    assert circuit.admit(1.0)


def test_stragglers_do_not_prolong_the_pause() -> None:
    """Attempts that were in flight when it opened, and fail later, change nothing."""
    circuit = opened()
    for _ in range(50):
        circuit.failed(0.9)
    assert circuit.state(1.0) is CircuitState.HALF_OPEN
    circuit.succeeded()
    assert circuit.state(0.95) is CircuitState.OPEN


def test_time_spent_in_the_engines_step_opens_it() -> None:
    """A child that is slow inside the step is left alone, though nothing failed; what is long ago does not count."""
    circuit = Circuit(CircuitPolicy(window_s=10.0, spent_s=1.0))
    circuit.spent(0.9, 0.0)
    circuit.spent(0.9, 20.0)
    assert circuit.state(20.0) is CircuitState.CLOSED
    circuit.spent(0.2, 21.0)
    assert circuit.state(21.0) is CircuitState.OPEN


def test_a_slow_probe_keeps_it_open_for_longer() -> None:
    """A child that is slow when it is probed costs its time ever more rarely; one that is quick closes it."""
    circuit = Circuit(CircuitPolicy(window_s=10.0, spent_s=1.0, pause_s=1.0, pause_max_s=8.0))
    circuit.spent(4.5, 0.0)
    assert circuit.state(0.9) is CircuitState.OPEN
    assert circuit.admits(1.0)
    circuit.spent(4.5, 1.0)
    assert circuit.state(2.9) is CircuitState.OPEN
    assert circuit.admit(3.0)
    assert not circuit.admits(3.0)
    circuit.spent(4.5, 3.0)
    circuit.succeeded()
    assert circuit.state(6.9) is CircuitState.OPEN
    assert circuit.admit(7.0)
    circuit.succeeded()
    assert circuit.state(7.0) is CircuitState.CLOSED


def test_asking_whether_it_admits_spends_no_probe() -> None:
    """Only an attempt does."""
    circuit = opened()
    assert circuit.admits(1.0)
    assert circuit.admits(1.0)
    assert circuit.admit(1.0)
    assert not circuit.admits(1.0)


def test_it_can_be_opened_at_once() -> None:
    """Whoever finds that nothing goes any more need not wait for failures to add up."""
    circuit = Circuit(POLICY)
    circuit.trip(0.0)
    assert not circuit.admit(0.5)
    assert circuit.admit(1.0)
