"""Encoders: images of any size, several parts at once, and their use in a rollout."""

import statistics
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from seeing_env import Spotlight, spotlights
from short_trainings import learned, mean_return
from torch import Tensor, nn

from esper_telemetry.events import MinibatchEnd, RolloutEnd
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.collectors.collector import TensorCollector
from esper_telemetry.ppo.collectors.inference import torch_network
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, Image, ObservationLayout, TensorStep
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.environments.gymnasium import GymnasiumEnvironment
from esper_telemetry.ppo.networks import Encoded, ImageEncoder
from esper_telemetry.ppo.normalizer import VectorNormalizer
from esper_telemetry.ppo.rollout import Rollout

SETTINGS: dict[str, Any] = {"num_steps": 16, "num_epochs": 2, "hidden_sizes": (16,), "lstm_size": 16, "seed": 3}
ENVS = ["Spotlight-v0", "SpotlightParts-v0"]


def trainer(env_id: str = "Spotlight-v0", num_envs: int = 4, **settings: Any) -> PPO:
    return PPO(make_env(env_id, num_envs=num_envs, seed=1), PPOConfig(**{**SETTINGS, **settings}))


@pytest.mark.parametrize("size", [(8, 8), (10, 14), (15, 15), (16, 40), (35, 35), (36, 36), (64, 48), (84, 84)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_images_of_every_size_have_an_encoder(size: tuple[int, int], channels_last: bool) -> None:
    shape = (*size, 3) if channels_last else (3, *size)
    encoder = ImageEncoder(Image(shape, channels_last))

    features = encoder(torch.zeros(2, *shape, dtype=torch.uint8))

    assert features.shape == (2, encoder.features) and features.isfinite().all()


def test_84_by_84_is_encoded_as_in_the_paper() -> None:
    """Mnih et al. 2015: 32 filters 8x8/4, 64 4x4/2, 64 3x3/1, then 512 units on 7 x 7 x 64."""
    encoder = ImageEncoder(Image((4, 84, 84)))

    shapes = [tuple(layer.weight.shape) for layer in encoder.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]

    assert shapes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136)]


def test_an_image_below_8_pixels_has_none() -> None:
    with pytest.raises(ValueError, match=r"at least 8 pixels on each side, got \(1, 7, 9\)"):
        ImageEncoder(Image((1, 7, 9)))


def test_layers_begin_orthogonal_with_zero_biases() -> None:
    for layer in ImageEncoder(Image((3, 10, 10))).modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            rows = layer.weight.flatten(1)
            rows = rows if len(rows) <= rows.shape[1] else rows.t()
            torch.testing.assert_close(rows @ rows.t(), 2 * torch.eye(len(rows)), rtol=0, atol=1e-4)
            assert layer.bias is not None and not layer.bias.any()


@pytest.mark.parametrize(
    ("image", "stored", "scaled"),
    [
        (Image((1, 8, 8)), 51, 0.2),
        (Image((1, 8, 8), dtype="float32", low=-1.0, high=3.0), 1.0, 0.5),
        (Image((1, 8, 8), dtype="float32", low=0.0, high=1.0), 0.25, 0.25),
        (Image((1, 8, 8), dtype="float32", low=-np.inf, high=np.inf), 7.5, 7.5),
        (Image((1, 8, 8), dtype="float32", low=-3e38, high=3e38), 7.5, 7.5),
    ],
)
def test_pixels_are_scaled_on_the_device(image: Image, stored: float, scaled: float) -> None:
    pixels = torch.full((1, *image.shape), stored).to(getattr(torch, image.dtype))

    assert ImageEncoder(image).scaled(pixels).unique().tolist() == pytest.approx([scaled])


def test_both_layouts_of_an_image_are_encoded_alike() -> None:
    first, last = ImageEncoder(Image((3, 12, 9))), ImageEncoder(Image((12, 9, 3), channels_last=True))
    last.load_state_dict(first.state_dict())
    pixels = torch.randint(256, (5, 3, 12, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    assert torch.allclose(first(pixels), last(pixels.permute(0, 2, 3, 1)))


def test_each_part_has_an_encoder_of_its_own() -> None:
    """The features are concatenated: two images, then 64 of the numbers. Each encoder reads only its own part."""
    layout = ObservationLayout(2, 3, (Image((1, 8, 8)), Image((9, 8, 1), True, "float32", 0.0, 1.0)))
    encoder = Encoded(layout, (), "tanh").encoder
    generator = np.random.default_rng(0)
    parts = generator.normal(size=(1, 5)), generator.integers(256, size=(1, 1, 8, 8)), generator.random((1, 9, 8, 1))

    def features(numbers: Any, *images: Any) -> list[Tensor]:
        return list(encoder(torch.from_numpy(layout.pack([numbers], images))).split([128, 128, 64], -1))

    before = features(*parts)
    for changed in range(3):
        after = features(*(part * 0 if index == changed else part for index, part in enumerate(parts)))
        place = (2, 0, 1)[changed]
        assert [not torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [i == place for i in range(3)]


@pytest.mark.parametrize("env_id", ENVS)
def test_a_rollout_keeps_bytes(env_id: str) -> None:
    """64 pixels. Rows of several parts add 4 bytes each for the time and the two shifts."""
    rollout = trainer(env_id).collector.collect()

    assert rollout.observations.dtype == torch.uint8
    assert rollout.observations.shape == (16, 4, *((76,) if "Parts" in env_id else (8, 8, 1)))


LEARNING: dict[str, Any] = {"num_steps": 32, "num_epochs": 4, "learning_rate": 2e-3, "gamma": 0.0, "anneal_learning_rate": False}


@pytest.mark.system
@pytest.mark.parametrize("policy", ["mlp", pytest.param("lstm", marks=pytest.mark.slow)])
def test_a_spotlight_is_learned_from_pixels(policy: str) -> None:
    """Guessing pays 0.25 a step of 8; the image has all the information."""
    assert mean_return(trainer(num_envs=8, policy=policy, **LEARNING), 6_000) > 0.7 * 8


@pytest.mark.system
@pytest.mark.parametrize("shared_trunk", [pytest.param(False, marks=pytest.mark.slow), True])
def test_image_and_choice_are_combined(shared_trunk: bool) -> None:
    """The image alone pays 0.5: the shift, a Discrete of two values, decides between two answers."""
    source = trainer("SpotlightParts-v0", num_envs=16, shared_trunk=shared_trunk, normalize_observations=True, **LEARNING)

    assert mean_return(source, 12_000) > 0.6 * 8


@pytest.mark.system
@pytest.mark.parametrize(("env_id", "chance"), [("FrozenLake-v1", 0.02), pytest.param("Blackjack-v1", -0.4, marks=pytest.mark.slow)])
def test_choices_are_learned_from(env_id: str, chance: float) -> None:
    """A Discrete, and a Tuple of three: FrozenLake without slipping, and Blackjack."""
    kwargs = {"is_slippery": False} if env_id == "FrozenLake-v1" else {}
    env = make_env(env_id, num_envs=8, seed=1, **kwargs)
    source = PPO(env, PPOConfig(num_steps=64, seed=2, hidden_sizes=(32,), entropy_coef=0.02, learning_rate=5e-3))

    assert mean_return(source, 16_000, episodes=300) > chance + 0.2


def short_episodes(mode: AutoresetMode, source: PPO, *, parts: bool) -> Rollout:
    """Return a rollout in environments of 3 and 5 steps."""
    env = GymnasiumEnvironment(spotlights(mode, parts=parts), seed=5)
    other = PPO(env, replace(source.config, num_minibatches=2))
    other.policy.load_state_dict(source.policy.state_dict())
    return other.collector.collect()


@pytest.mark.parametrize("policy", ["mlp", "lstm"])
@pytest.mark.parametrize("parts", [False, True])
def test_a_cut_episode_is_valued_by_its_last_observation(parts: bool, policy: str) -> None:
    """SAME_STEP gives this observation as `final_obs`; in the other modes it is the next observation."""
    source = trainer(ENVS[parts], num_envs=2, policy=policy, num_minibatches=1)
    same = short_episodes(AutoresetMode.SAME_STEP, source, parts=parts)
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        other = short_episodes(mode, source, parts=parts)

        assert same.valid is None and (other.valid is None) == (mode is AutoresetMode.DISABLED)
        # Environment 0 has episodes of 3 steps: in all modes its third step is cut before their actions can differ.
        assert same.ended[2, 0] and other.ended[2, 0] and not same.terminated.any()
        assert torch.equal(same.observations[:3, 0], other.observations[:3, 0])
        assert float(same.next_values[2, 0]) == pytest.approx(float(other.next_values[2, 0]), abs=1e-6)
    assert float(same.next_values[2, 0]) != pytest.approx(float(same.values[3, 0]), abs=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_many_rows_go_through_in_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten images of 64 bytes at a time."""
    monkeypatch.setattr("esper_telemetry.ppo.collectors.inference.MAX_BATCH_BYTES", 640)
    encoder = ImageEncoder(Image((1, 8, 8)))
    pixels = np.random.default_rng(0).integers(256, size=(rows, 1, 8, 8), dtype=np.uint8)

    features = torch_network(encoder, torch.device("cpu"))(pixels)

    assert features == pytest.approx(encoder(torch.from_numpy(pixels)).detach().numpy(), abs=1e-5)


def test_only_vectors_are_normalised() -> None:
    """Columns: 2 measurements, 3 choices, 64 pixels. NumPy and torch agree, and so do acting and training."""
    layout = ObservationLayout(2, 3, (Image((1, 8, 8)),))
    generator = np.random.default_rng(0)
    numbers = [generator.normal(5.0, 3.0, (50, 2)), np.eye(3)[generator.integers(3, size=50)]]
    rows = layout.pack(numbers, [generator.integers(256, size=(50, 1, 8, 8))])
    normalizer = VectorNormalizer(layout)
    normalizer.update(torch.from_numpy(rows))

    scaled = normalizer(torch.from_numpy(rows))

    normalised = layout.numbers_of(scaled)
    assert normalised[:, :2].mean(0).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert normalised[:, :2].std(0, correction=0).tolist() == pytest.approx([1, 1], abs=1e-4)
    assert np.array_equal(normalised[:, 2:].numpy(), numbers[1])
    assert np.array_equal(scaled[:, 20:].numpy(), rows[:, 20:])
    host = normalizer.as_numpy()(rows)
    assert host.dtype == np.uint8 and layout.numbers_of(host) == pytest.approx(normalised.numpy(), abs=1e-6)


def test_statistics_of_vectors_follow_the_rollouts_and_what_has_no_vectors_has_none() -> None:
    """Time runs from 0 to 7 in episodes of 8, so its mean over whole episodes is 3.5."""
    of_parts, of_images, of_choices = (trainer(env_id, normalize_observations=True) for env_id in (*reversed(ENVS), "FrozenLake-v1"))

    of_parts.learn(1)

    normalizer = of_parts.normalizers.observations
    assert isinstance(normalizer, VectorNormalizer)
    assert normalizer.mean.tolist() == pytest.approx([3.5]) and float(normalizer.count) == 64
    assert of_images.normalizers.observations is None and of_choices.normalizers.observations is None


@pytest.mark.system
def test_evaluation_sees_images_too() -> None:
    source = trainer(num_envs=8, **LEARNING)
    source.learn(4_000)

    evaluation = source.evaluate(make_env("Spotlight-v0", num_envs=5, seed=9))

    assert list(evaluation.lengths) == [8] * 5 and statistics.fmean(evaluation.returns) > 5


class Lights:
    """The spotlight as a tensor environment that declares its own layout."""

    name, num_envs = "lights", 6
    observation_layout = ObservationLayout(0, 0, (Image((1, 8, 8)),))
    observation_shape = observation_layout.shape

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.action_specs = {"action": ActionSpec("categorical", 4)}
        self._generator = torch.Generator().manual_seed(0)

    def reset(self, seed: int | None = None) -> Tensor:
        return self._observe()

    def step(self, actions: Any) -> TensorStep:
        rewards = (actions["action"] == self._lit).float()
        never = torch.zeros(6, dtype=torch.bool)
        return TensorStep(self._observe(), rewards, never, never)

    def close(self) -> None:
        """Nothing to free."""

    def _observe(self) -> Tensor:
        self._lit = torch.randint(4, (6,), generator=self._generator)
        images = torch.zeros(6, 2, 2, dtype=torch.uint8).flatten(1).scatter(1, self._lit[:, None], 255).view(6, 1, 2, 2)
        return images.repeat_interleave(4, 2).repeat_interleave(4, 3)


@pytest.mark.system
@pytest.mark.parametrize("on_device", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tensor_environments_may_declare_images(on_device: bool) -> None:
    config = PPOConfig(**{**SETTINGS, **LEARNING})
    source = PPO(Lights(), config)
    if on_device:
        source.collector = TensorCollector(Lights(), source.policy, config.num_steps, seed=0)

    source.learn(5_000)

    assert float(source.collector.collect().rewards.mean()) > 0.7


def test_several_kinds_of_actions_are_chosen_from_pixels() -> None:
    """A Dict of actions: a squashed Gaussian, two bits and a choice. Their log-probabilities add up to the joint one."""

    class Many(Spotlight):
        def __init__(self) -> None:
            super().__init__(parts=True)
            box = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
            self.action_space = gymnasium.spaces.Dict(pick=gymnasium.spaces.Discrete(4), bits=gymnasium.spaces.MultiBinary(2), push=box)

        def step(self, action: Any) -> Any:
            assert action in self.action_space
            return super().step(action["pick"])

    vector = gymnasium.vector.SyncVectorEnv([Many, Many], autoreset_mode=AutoresetMode.SAME_STEP)
    source = PPO(GymnasiumEnvironment(vector), PPOConfig(**{**SETTINGS, "num_minibatches": 2, "squash": True}))
    emitted = learned(source, 64, RolloutEnd, MinibatchEnd)

    rollout = emitted.of(RolloutEnd)[0]
    assert set(rollout.actions) == {"bits_0", "bits_1", "pick", "push"}
    assert torch.allclose(rollout.log_probs, torch.stack(list(rollout.head_log_probs.values())).sum(0), atol=1e-5)
    assert emitted.of(MinibatchEnd)[0].log_ratio.abs().max() < 1e-5
