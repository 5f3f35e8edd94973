"""Reacts to alarms: the learning rate is raised a hundredfold in the middle of the run, and a callback restores it.

python examples/on_alarm.py
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from esper_telemetry import PPO, Alarm, PPOConfig, Telemetry, attach, make_env
from esper_telemetry.events import UpdateEnd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=65_536)
    parser.add_argument("--run-dir", help="a new runs/on-alarm-<time> by default")
    options = parser.parse_args()

    trainer = PPO(make_env("CartPole-v1", num_envs=8), PPOConfig(seed=1))
    usual = trainer.config.learning_rate
    mistake = options.total_steps // (2 * 8 * trainer.config.num_steps)

    def learn_too_fast(event: UpdateEnd) -> None:
        if event.update == mistake:
            trainer.config = replace(trainer.config, learning_rate=100 * usual)

    def calm_down(alarm: Alarm) -> None:
        """Runs on the training thread, between two updates."""
        print(f"{alarm.event}: {alarm.type} since update {alarm.since}. {alarm.text}")
        if alarm.event == "raise" and trainer.config.learning_rate > usual:
            trainer.config = replace(trainer.config, learning_rate=usual)
            telemetry.notify_intervention("restored the learning rate", learning_rate=usual)

    trainer.hooks.on(UpdateEnd, learn_too_fast)
    # without a worker process alarms come at the end of the same update, with one an update or two later
    with Telemetry(run_dir=options.run_dir or "auto", name="on-alarm", offload=False) as telemetry:
        attach(telemetry, trainer)
        telemetry.on_alarm(calm_down)
        trainer.learn(options.total_steps)
    print(f"learning rate at the end: {trainer.config.learning_rate:g}; journal: {telemetry.run_dir}/journal.jsonl")


if __name__ == "__main__":
    main()
