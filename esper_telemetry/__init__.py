"""Telemetry that tells you why your PPO run is going wrong, in the dashboard you already have open.

The tour:

    from esper_telemetry import PPO, PPOConfig, Telemetry, TensorBoardSink, attach, make_env

    with Telemetry([TensorBoardSink()], run_dir="runs/a") as telemetry:
        trainer = PPO(make_env("CartPole-v1", num_envs=8), PPOConfig())
        attach(telemetry, trainer)
        trainer.learn(total_steps=100_000)

and in a loop of your own:

    telemetry.observe(advantage_stats(advantages), value_fit(values, returns))
    telemetry.observe(gradient_health(agent), ratio_diagnostics(log_ratio, advantages, clip=0.2), epoch=epoch)
    telemetry.flush(env_step=global_step)

Names are imported when they are first used, so that a sink's process needs no torch and a trainer no backend.
"""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.core.group import MetricGroup as MetricGroup
    from esper_telemetry.core.metric import Metric as Metric
    from esper_telemetry.core.metric import Rows as Rows
    from esper_telemetry.core.metric import label as label
    from esper_telemetry.core.metric import reports as reports
    from esper_telemetry.core.record import Alarm as Alarm
    from esper_telemetry.core.record import Axes as Axes
    from esper_telemetry.core.record import Level as Level
    from esper_telemetry.core.record import Record as Record
    from esper_telemetry.core.record import RunInfo as RunInfo
    from esper_telemetry.core.record import RunStatus as RunStatus
    from esper_telemetry.core.reduction import Counts as Counts
    from esper_telemetry.core.reduction import Ess as Ess
    from esper_telemetry.core.reduction import Last as Last
    from esper_telemetry.core.reduction import Max as Max
    from esper_telemetry.core.reduction import Mean as Mean
    from esper_telemetry.core.reduction import Min as Min
    from esper_telemetry.core.reduction import Moments as Moments
    from esper_telemetry.core.reduction import Sum as Sum
    from esper_telemetry.delivery.catch_up import doctor as doctor
    from esper_telemetry.delivery.catch_up import replay as replay
    from esper_telemetry.equations.clipping import check_clipping as check_clipping
    from esper_telemetry.equations.drawn_actions import check_actions as check_actions
    from esper_telemetry.equations.entropy_loss import check_entropy as check_entropy
    from esper_telemetry.equations.entropy_loss import check_total_loss as check_total_loss
    from esper_telemetry.equations.gae_advantages import check_gae as check_gae
    from esper_telemetry.equations.gradient import check_gradient as check_gradient
    from esper_telemetry.equations.log_probs import check_log_probs as check_log_probs
    from esper_telemetry.equations.minibatch_rows import check_log_ratios as check_log_ratios
    from esper_telemetry.equations.minibatch_rows import check_minibatches as check_minibatches
    from esper_telemetry.equations.normalization import check_normalized_advantages as check_normalized_advantages
    from esper_telemetry.equations.optimizer_step import check_optimizer_step as check_optimizer_step
    from esper_telemetry.equations.policy_loss import check_policy_loss as check_policy_loss
    from esper_telemetry.equations.replayed_outputs import check_replayed_log_probs as check_replayed_log_probs
    from esper_telemetry.equations.replayed_outputs import check_values as check_values
    from esper_telemetry.equations.returns import check_returns as check_returns
    from esper_telemetry.equations.schedules import check_schedule as check_schedule
    from esper_telemetry.equations.transitions import check_executed as check_executed
    from esper_telemetry.equations.transitions import check_rewards as check_rewards
    from esper_telemetry.equations.transitions import check_transitions as check_transitions
    from esper_telemetry.equations.value_loss import check_value_loss as check_value_loss
    from esper_telemetry.events import Hooks as Hooks
    from esper_telemetry.journal.read import read_run as read_run
    from esper_telemetry.metrics.advantages import advantage_stats as advantage_stats
    from esper_telemetry.metrics.gradients.gradient_health import gradient_health as gradient_health
    from esper_telemetry.metrics.ratio import ratio_diagnostics as ratio_diagnostics
    from esper_telemetry.metrics.values import value_fit as value_fit
    from esper_telemetry.ppo.config import PPOConfig as PPOConfig
    from esper_telemetry.ppo.environments.environment_registry import make_env as make_env
    from esper_telemetry.ppo.trainer import PPO as PPO
    from esper_telemetry.sinks.console import ConsoleSink as ConsoleSink
    from esper_telemetry.sinks.mlflow.mlflow_sink import MLflowSink as MLflowSink
    from esper_telemetry.sinks.prometheus import PrometheusSink as PrometheusSink
    from esper_telemetry.sinks.sink_protocol import PermanentSinkError as PermanentSinkError
    from esper_telemetry.sinks.sink_protocol import Sink as Sink
    from esper_telemetry.sinks.sink_registry import register_sink as register_sink
    from esper_telemetry.sinks.tensorboard.tensorboard_sink import TensorBoardSink as TensorBoardSink
    from esper_telemetry.sinks.wandb.wandb_sink import WandbSink as WandbSink
    from esper_telemetry.telemetry import Telemetry as Telemetry
    from esper_telemetry.telemetry import attach as attach
    from esper_telemetry.telemetry import watch_pair as watch_pair

__version__ = "0.3.0"

__all__, __getattr__, __dir__ = lazy_names(__name__)
