"""The script as a loop that calls the checks itself, and the mistakes of scripts in it."""

from __future__ import annotations

from dataclasses import replace

import equation_bugs_rollout as rollout
import equation_bugs_update as update
from equation_bugs import Bug, Edit

OWN_LOOP: tuple[Edit, ...] = (
    (
        "import torch.nn as nn\n",
        """import torch.nn as nn
import copy
from esper_telemetry import (
    Telemetry, check_actions, check_entropy, check_gae, check_log_probs, check_log_ratios, check_minibatches, check_normalized_advantages,
    check_optimizer_step, check_policy_loss, check_replayed_log_probs, check_returns, check_rewards, check_schedule, check_total_loss,
    check_transitions, check_value_loss, check_values,
)
""",
    ),
    ("args = parser.parse_args()\n", 'parser.add_argument("--run-dir")\nargs = parser.parse_args()\n'),
    (
        "global_step = 0\n",
        """global_step = 0
telemetry = Telemetry([], run_dir=args.run_dir, level="debug", config=args, offload=False)
ended, paid, returned, rates, progress = torch.zeros_like(dones).bool(), torch.zeros_like(rewards), torch.zeros_like(obs), [], []
finals = torch.zeros_like(obs)
kept, before = copy.deepcopy(optimizer.state_dict()), None  # after the last step, and the weights of the update before
""",
    ),
    (
        "infos = envs.step(action.numpy())\n",
        """infos = envs.step(action.numpy())
        paid[step], returned[step] = torch.tensor(reward), torch.tensor(state)  # as the environments return them
        ended[step] = torch.tensor(terminations | truncations)
        for index in np.flatnonzero(terminations | truncations):
            finals[step, index] = torch.tensor(infos["final_obs"][index])
""",
    ),
    (
        "    b_obs = obs.reshape((-1, *obs_shape))\n",
        """    with torch.no_grad():
        following = torch.cat([values[1:], agent.get_value(next_obs).reshape(1, -1)]) * ~ended
        logits = agent.logits(obs)
        _, replayed, _, own_values = agent.get_action_and_value(obs, actions)
        earlier = {} if before is None else {"older_weights": lambda: before.get_action_and_value(obs, actions)[1]}
        earlier_values = {} if before is None else {"older_weights": lambda: before.get_value(obs).squeeze(-1)}
    telemetry.observe(
        check_gae(rewards, values, advantages, ended=ended, next_values=following, gamma=args.gamma, gae_lambda=args.gae_lambda),
        check_returns(advantages, values, returns, rewards=rewards, next_values=following, ended=ended, gamma=args.gamma),
        check_actions(actions.long(), logits=logits),
        check_log_probs(actions.long(), logprobs, logits=logits),
        check_replayed_log_probs(logprobs, replayed, alternatives=earlier),
        check_values(values, own_values.squeeze(-1), alternatives=earlier_values),
        check_transitions(obs, returned, ended=ended, final_observations=finals),
        check_rewards(rewards, paid),
    )
    passes, losses, before = [], [], copy.deepcopy(agent)
    b_obs = obs.reshape((-1, *obs_shape))
""",
    ),
    (
        "            if args.clip_vloss:\n",
        """            mb_raw = b_advantages[mb_inds]
            order = b_advantages[start : start + minibatch_size]
            scope = "minibatch" if args.norm_adv else "nothing"
            telemetry.observe(
                check_log_ratios(logratio, newlogprob, b_logprobs[mb_inds]),
                check_normalized_advantages(mb_raw, mb_advantages, over=scope, in_order=order),
                check_policy_loss(pg_loss, logratio, mb_advantages, clip=args.clip_coef, raw_advantages=mb_raw, log_probs=newlogprob)
            )
            passes += [[]] if start == 0 else []
            passes[-1].append(mb_inds.copy())
            if args.clip_vloss:
""",
    ),
    (
        "            optimizer.step()\n",
        """            telemetry.observe(
                check_value_loss(v_loss, newvalue, b_returns[mb_inds], old_values=b_values[mb_inds], advantages=mb_raw),
                check_entropy(-entropy_loss, logits={"action": agent.logits(b_obs[mb_inds])}, chosen_log_probs=newlogprob),
            )
            losses.append(torch.stack([loss, pg_loss, v_loss, -entropy_loss]).detach())
            weights = [p.detach().clone() for p in agent.parameters()]
            optimizer.step()
            gradients = [p.grad for p in agent.parameters()]
            telemetry.observe(check_optimizer_step(weights, list(agent.parameters()), gradients, optimizer, state=kept))
            kept = copy.deepcopy(optimizer.state_dict())
""",
    ),
    (
        '    print(f"step {global_step},',
        """    rates.append(optimizer.param_groups[0]["lr"])
    progress.append((iteration - 1) / num_iterations)
    final = 0.0 if args.anneal_lr else args.learning_rate
    telemetry.observe(
        check_total_loss(*torch.stack(losses, 1), value_coef=args.vf_coef, entropy_coef=args.ent_coef),
        check_minibatches(passes, batch_size, environments=args.num_envs),
        check_schedule(rates, progress, initial=args.learning_rate, final=final),
    )
    telemetry.flush(env_step=global_step)
    print(f"step {global_step},""",
    ),
    ("parameters = torch.cat(", "telemetry.close()\nparameters = torch.cat("),
    (
        "    def get_value(self, x: Any) -> Any:\n",
        "    def logits(self, x: Any) -> Any:\n        return 3 * self.actor(x)\n\n    def get_value(self, x: Any) -> Any:\n",
    ),
)
"""`script.py` with checks in it."""

REUSED = [
    "forward",
    "ends_ignored",
    "ends_late",
    "dones_after_step",
    "no_bootstrap",
    "bootstrap_old_value",
    "gamma",
    "lambda",
    "reward_shift",
    "reward_clip",
    "sign_both",
    "axes_gae",
    "returns_normalized",
    "returns_mc",
    "stale_weights",
    "argmax",
    "independent",
    "sticky",
    "action_permuted_stored",
    "obs_never_updated",
    "acts_on_stale_obs",
    "final_obs_after_reset",
    "reward_before_obs",
    "obs_alias",
    "values_next",
    "pg_sign",
    "pg_no_minimum",
    "pg_no_clip",
    "pg_ratio_inverted",
    "pg_rows",
    "pg_sum",
    "v_advantage",
    "v_old_values",
    "v_double",
    "entropy_sign",
    "entropy_sample",
    "entropy_weight",
    "value_weight",
    "state_lost",
    "decay",
    "missing_parameter",
    "other_optimizer",
    "same_minibatches",
    "with_replacement",
    "overlapping",
    "rows_left_out",
    "schedule_restarts",
    "schedule_negative",
    "schedule_ends_early",
]
SCRIPT_BUGS = {
    bug.name: bug
    for bug in (*rollout.SCRIPT_TARGETS, *rollout.SCRIPT_COLLECTING, *update.SCRIPT_LOSSES, *update.SCRIPT_STEPS)
}
LOOP: tuple[Bug, ...] = tuple(
    replace(bug, name=f"loop-{name}", edits=(*bug.edits, *OWN_LOOP))
    for name in REUSED
    for bug in (SCRIPT_BUGS[f"script-{name}"],)
)
