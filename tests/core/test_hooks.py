"""Hooks are keyed by the type of the event."""

from dataclasses import dataclass

from esper_telemetry.events import Hooks


@dataclass(frozen=True)
class Ping:
    number: int


@dataclass(frozen=True)
class LoudPing(Ping):
    pass


def test_a_removed_hook_hears_nothing_and_may_be_removed_twice() -> None:
    hooks = Hooks()
    heard: list[Ping] = []
    remove = hooks.on(Ping, heard.append)
    remove()
    remove()

    hooks.emit(Ping(1))

    assert heard == []
    assert not hooks.wants(Ping)


def test_a_hook_may_remove_itself_while_it_runs() -> None:
    hooks = Hooks()
    heard: list[int] = []

    def once(event: Ping) -> None:
        heard.append(event.number)
        remove()

    remove = hooks.on(Ping, once)
    hooks.on(Ping, lambda event: heard.append(-event.number))
    hooks.emit(Ping(1))
    hooks.emit(Ping(2))

    assert heard == [1, -1, -2]


def test_hooks_receive_events_of_exactly_their_type_in_order_and_the_last_after_those_that_come_later() -> None:
    hooks = Hooks()
    heard: list[str] = []
    remove = hooks.on(Ping, lambda event: heard.append("last"), last=True)
    assert hooks.wants(Ping)
    hooks.on(Ping, lambda event: heard.append(f"first {event.number}"))
    hooks.on(Ping, lambda event: heard.append("second"))
    hooks.on(LoudPing, lambda event: heard.append("loud"))

    hooks.emit(Ping(1))
    remove()
    hooks.emit(Ping(2))

    assert heard == ["first 1", "second", "last", "first 2", "second"]


def test_a_source_learns_whether_a_hook_wants_its_events_at_once() -> None:
    hooks = Hooks()
    late = hooks.on(Ping, lambda event: None, late=True)
    assert hooks.wants(Ping) and not hooks.wants_now(Ping)

    now = hooks.on(Ping, lambda event: None)
    assert hooks.wants_now(Ping)

    now()
    assert not hooks.wants_now(Ping)
    late()
    assert not hooks.wants(Ping)
