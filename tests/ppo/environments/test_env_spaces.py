"""Gymnasium spaces: how the trainer encodes them, and the errors for unsupported ones."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, Image, ObservationLayout, Structured, layout_of
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.environments.spaces import action_parts, as_image, observation_form

FLOATS = spaces.Box(-1, 1, (2, 3), np.float32)
PIXELS = spaces.Box(0, 255, (9, 8, 3), np.uint8)
DEPTH = spaces.Box(0, 1, (1, 8, 8), np.float32)


def samples(space: spaces.Space[Any], count: int) -> tuple[list[Any], Any]:
    """Return single observations, and the same observations as a batch of a vector environment."""
    space.seed(0)
    single = [space.sample() for _ in range(count)]
    batch = gymnasium.vector.utils.create_empty_array(space, count)
    return single, gymnasium.vector.utils.concatenate(space, single, batch)  # type: ignore[arg-type] # theirs is wider


@pytest.mark.parametrize(
    ("space", "shape", "layout"),
    [
        (FLOATS, (2, 3), ObservationLayout(6)),
        (spaces.Box(-1, 1, ()), (1,), ObservationLayout(1)),
        (PIXELS, (9, 8, 3), ObservationLayout(0, 0, (Image((9, 8, 3), True),))),
        (DEPTH, (1, 8, 8), ObservationLayout(0, 0, (Image((1, 8, 8), False, "float32", 0.0, 1.0),))),
        (spaces.Box(0, 255, (8, 9), np.uint8), (1, 8, 9), ObservationLayout(0, 0, (Image((1, 8, 9)),))),
        (spaces.Box(0, 255, (7, 7, 3), np.uint8), (7, 7, 3), ObservationLayout(147)),
        (spaces.Discrete(5), (5,), ObservationLayout(0, 5)),
        (spaces.MultiBinary([2, 2]), (4,), ObservationLayout(0, 4)),
        (spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])), (14,), ObservationLayout(0, 14)),
        (spaces.Dict(b=spaces.Discrete(5), a=FLOATS), (11,), ObservationLayout(6, 5)),
        (spaces.Tuple((spaces.Discrete(2), spaces.Tuple((FLOATS, FLOATS)))), (14,), ObservationLayout(12, 2)),
        # 6 + 5 floats of 4 bytes, and 216 pixels
        (spaces.Dict(x=FLOATS, d=spaces.Discrete(5), p=PIXELS), (260,), ObservationLayout(6, 5, (Image((9, 8, 3), True),))),
    ],
)
def test_observations_have_a_layout(space: spaces.Space[Any], shape: tuple[int, ...], layout: ObservationLayout) -> None:
    form = observation_form(space, "it")

    assert (form.shape, form.layout) == (shape, layout)
    assert layout.shape == shape if form.pack is not None else isinstance(space, spaces.Box)


def test_one_hot_choices_stand_behind_the_vectors() -> None:
    """3 in Discrete(3, start=2) is its second choice. [1, 0] in MultiDiscrete([2, 3]) sets the second and third number."""
    space = spaces.Dict(a=spaces.Discrete(3, start=2), b=spaces.MultiDiscrete([2, 3]), c=spaces.Box(0, 9, (2,)), d=spaces.MultiBinary(2))
    pack = observation_form(space, "it").pack
    assert pack is not None

    row = pack.one({"a": 3, "b": np.array([1, 0]), "c": np.array([7.0, 8.0]), "d": np.array([0, 1])})

    assert row.tolist() == [7, 8, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("batch", [1, 3])
def test_every_part_comes_back_out_of_a_row_in_numpy_and_in_torch(batch: int) -> None:
    """Rows hold bytes and floats: 2 x 6 + 5 floats, 64 floats of depth, and two images of 216 and 75 bytes."""
    odd = spaces.Box(0, 255, (8, 9, 1), np.uint8)
    space = spaces.Dict(p=PIXELS, z=DEPTH, q=odd, x=FLOATS, y=FLOATS, n=spaces.Discrete(5))
    form = observation_form(space, "it")
    single, together = samples(space, batch)
    assert form.pack is not None and form.layout.dtype == "uint8"

    rows = form.pack(together)

    assert rows.shape == (batch, *form.shape) and rows.dtype == np.uint8
    assert np.array_equal(rows, np.stack([form.pack.one(observation) for observation in single]))
    stored: Any
    for stored in (rows, torch.from_numpy(rows)):
        numbers, images = form.layout.numbers_of(stored), form.layout.images_of(stored)
        assert np.array_equal(np.asarray(numbers[:, :6]).reshape(-1, 2, 3), together["x"])
        assert np.array_equal(np.asarray(numbers[:, 12:]).argmax(-1), together["n"])
        for image, name in zip(images, ("p", "z", "q"), strict=True):
            assert np.array_equal(np.asarray(image), together[name])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=3, max_size=3), st.sampled_from(["uint8", "float32"]))
def test_a_box_is_an_image_where_height_and_width_are_long(shape: list[int], dtype: str) -> None:
    """The channels are the first axis if it is the shortest, otherwise the last."""
    image = as_image(spaces.Box(0, 1, tuple(shape), np.dtype(dtype).type))
    sides = shape[1:] if shape[0] == min(shape) else shape[:2]

    assert (image is not None) == (min(sides) >= 8)
    assert image is None or image.channels_first[1:] == tuple(sides)


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        (spaces.Text(5), "observation space of it must be Box, Discrete, .*, got Text"),
        (
            spaces.Dict(image=PIXELS, mission=spaces.Text(5)),
            r"observation space of it, part 'mission', must be .*Dict or Tuple of these, got Text",
        ),
        (spaces.Box(0, 1, (0,)), r"observation space of it is empty, got Box\(.*, \(0,\)"),
        (spaces.Dict(), r"observation space of it is empty, got Dict\(\)"),
        (spaces.Tuple((FLOATS, spaces.Sequence(FLOATS))), "observation space of it, part 1, must be .* got Sequence"),
    ],
)
def test_an_observation_that_cannot_be_used_is_named(space: spaces.Space[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        observation_form(space, "it")


@pytest.mark.parametrize(
    ("space", "specs", "chosen", "taken"),
    [
        (spaces.MultiBinary(2), {"action_0": 2, "action_1": 2}, {"action_0": [1, 0], "action_1": [0, 1]}, [[1, 0], [0, 1]]),
        (
            spaces.MultiDiscrete(np.array([[2, 3]]), start=np.array([[1, 0]])),
            {"action_0": 2, "action_1": 3},
            {"action_0": [1, 0], "action_1": [2, 1]},
            [[[2, 2]], [[1, 1]]],
        ),
    ],
)
def test_choices_are_factored(space: spaces.Space[Any], specs: dict[str, int], chosen: dict[str, Any], taken: Any) -> None:
    parts = action_parts(space, "it")

    joined = parts.join({name: np.array(part) for name, part in chosen.items()})

    assert parts.specs == {name: ActionSpec("categorical", size) for name, size in specs.items()}
    assert joined.tolist() == taken and all(row in space for row in joined)


def test_parts_of_a_dict_bear_its_keys() -> None:
    space = spaces.Dict(
        {
            "Move!": spaces.Discrete(3),
            "aim": spaces.Box(-1, np.inf, (2,), np.float32),
            "tools": spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(1))),
            "values": spaces.Discrete(2),
        }
    )
    parts = action_parts(space, "it")
    actions = {
        "move_": np.array([2]),
        "aim": np.array([[-3.0, 7.0]], np.float32),
        "tools_0": np.array([1]),
        "tools_1_0": np.array([1]),
        "action_values": np.array([1]),
    }

    joined = parts.join(actions)

    assert parts.specs == {
        "move_": ActionSpec("categorical", 3),
        "aim": ActionSpec("continuous", 2, low=(-1.0, -1.0), high=(np.inf, np.inf)),
        "tools_0": ActionSpec("categorical", 2),
        "tools_1_0": ActionSpec("categorical", 2),
        "action_values": ActionSpec("categorical", 2),
    }
    assert joined["aim"].tolist() == [[-1, 7]] and joined["tools"][1].tolist() == [[1]]
    assert next(iter(gymnasium.vector.utils.iterate(gymnasium.vector.utils.batch_space(space), joined))) in space


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        (spaces.Box(0, 5, (2,), np.int64), r"action space of it must be Discrete, .*Box of floats.*, got Box"),
        (spaces.Box(0, 1, (0,)), r"action space of it holds a part with nothing to choose, got Box\("),
        (spaces.Tuple(()), r"action space of it holds a part with nothing to choose, got Tuple\(\)"),
        (spaces.Dict(say=spaces.Text(5)), r"action space of it, part 'say', must be .*, got Text"),
        (
            spaces.Dict({"a": spaces.MultiBinary(1), "a_0": spaces.Discrete(2)}),
            "two parts of the action space of it would both be named 'a_0'",
        ),
    ],
)
def test_an_action_that_cannot_be_used_is_named(space: spaces.Space[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        action_parts(space, "it")


def test_an_environment_may_say_what_it_observes() -> None:
    plain, choices = make_env("CartPole-v1", num_envs=2), make_env("FrozenLake-v1", num_envs=2)

    assert layout_of(plain) == ObservationLayout(4)
    assert isinstance(choices, Structured) and layout_of(choices) == ObservationLayout(0, 16)
    assert np.asarray(choices.reset(0)).tolist() == [[1.0, *[0.0] * 15]] * 2
