"""Tools for tests: of sinks (`check_sink`, `MemorySink`, `FailingSink`), and of the equations of a trainer (`assert_gae` and others)."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.testing.equation_asserts import assert_actions as assert_actions
    from esper_telemetry.testing.equation_asserts import assert_clipping as assert_clipping
    from esper_telemetry.testing.equation_asserts import assert_entropy as assert_entropy
    from esper_telemetry.testing.equation_asserts import assert_executed as assert_executed
    from esper_telemetry.testing.equation_asserts import assert_gae as assert_gae
    from esper_telemetry.testing.equation_asserts import assert_gradient as assert_gradient
    from esper_telemetry.testing.equation_asserts import assert_log_probs as assert_log_probs
    from esper_telemetry.testing.equation_asserts import assert_log_ratios as assert_log_ratios
    from esper_telemetry.testing.equation_asserts import assert_minibatches as assert_minibatches
    from esper_telemetry.testing.equation_asserts import assert_normalized_advantages as assert_normalized_advantages
    from esper_telemetry.testing.equation_asserts import assert_optimizer_step as assert_optimizer_step
    from esper_telemetry.testing.equation_asserts import assert_policy_loss as assert_policy_loss
    from esper_telemetry.testing.equation_asserts import assert_replayed_log_probs as assert_replayed_log_probs
    from esper_telemetry.testing.equation_asserts import assert_returns as assert_returns
    from esper_telemetry.testing.equation_asserts import assert_rewards as assert_rewards
    from esper_telemetry.testing.equation_asserts import assert_schedule as assert_schedule
    from esper_telemetry.testing.equation_asserts import assert_total_loss as assert_total_loss
    from esper_telemetry.testing.equation_asserts import assert_transitions as assert_transitions
    from esper_telemetry.testing.equation_asserts import assert_value_loss as assert_value_loss
    from esper_telemetry.testing.equation_asserts import assert_values as assert_values
    from esper_telemetry.testing.sinks import CHECKS as CHECKS
    from esper_telemetry.testing.sinks import FailingSink as FailingSink
    from esper_telemetry.testing.sinks import MemorySink as MemorySink
    from esper_telemetry.testing.sinks import alarm as alarm
    from esper_telemetry.testing.sinks import check_sink as check_sink
    from esper_telemetry.testing.sinks import delivered as delivered
    from esper_telemetry.testing.sinks import expect_equal as expect_equal
    from esper_telemetry.testing.sinks import journalled as journalled
    from esper_telemetry.testing.sinks import record as record
    from esper_telemetry.testing.sinks import run_in as run_in

__all__, __getattr__, __dir__ = lazy_names(__name__)
