"""TorchRL's PPO under telemetry: one more line before the loop; `attach_trainer` does the same for a `PPOTrainer`.

python examples/torchrl_loop.py && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from esper_telemetry import Telemetry
from esper_telemetry.adapters.torchrl import attach_loss

ENVS, STEPS, EPOCHS, ROWS = 8, 128, 10, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--run-dir", help="a new runs/torchrl-<time> by default")
    parser.add_argument("--sinks", nargs="*", default=["console", "tensorboard"], help="such as wandb mlflow")
    options = parser.parse_args()
    torch.manual_seed(1)

    env = SerialEnv(ENVS, lambda: GymEnv("CartPole-v1"))
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec_unbatched,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)), in_keys=["observation"])
    loss_module = ClipPPOLoss(actor, critic, critic_coeff=0.5, entropy_coeff=0.01, loss_critic_type="l2")
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    collector = Collector(env, actor, frames_per_batch=ENVS * STEPS, total_frames=options.total_steps)
    sampler = SamplerWithoutReplacement()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(ENVS * STEPS), sampler=sampler, batch_size=ROWS)

    with Telemetry(options.sinks, run_dir=options.run_dir or "auto", name="torchrl") as telemetry:
        telemetry.on_alarm(lambda alarm: print(f"{alarm.event}: {alarm.type}. {alarm.text}"))
        facts = {"env": "CartPole-v1", "total_steps": options.total_steps, "reward_threshold": 475}
        attach_loss(telemetry, loss_module, optimizer, gae, facts=facts)
        for batch in collector:
            for _ in range(EPOCHS):
                gae(batch)
                buffer.empty()
                buffer.extend(batch.reshape(-1))
                for _ in range(ENVS * STEPS // ROWS):
                    losses = loss_module(buffer.sample())
                    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                    nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
    print(f"journal: {telemetry.run_dir}/journal.jsonl")


if __name__ == "__main__":
    main()
