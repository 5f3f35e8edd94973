"""Mistakes in losses, gradients and steps of the optimizer, in a script."""

from __future__ import annotations

from equation_bugs import ADV, ENT, GRAD, ISSUES, MB, NORM, OPT, PG, SCHED, VF, Bug, script

ROWS = "            mb_inds = b_inds[start : start + minibatch_size]\n"
SQUARE = "v_loss = 0.5 * ((newvalue - b_returns[mb_inds]) ** 2).mean()"
FRAC = "frac = 1.0 - (iteration - 1.0) / num_iterations"
MAKE_ADAM = "optimizer = torch.optim.Adam("
DESCENT = """class Descent(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


"""
DECAYING = """class Decaying(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.999)


"""
SCRIPT_LOSSES = (
    script(
        "pg_sign",
        (PG,),
        "sign|negat|minus|ascent",
        ("pg_loss = torch.max(pg_loss1, pg_loss2).mean()", "pg_loss = -torch.max(pg_loss1, pg_loss2).mean()"),
    ),
    script(
        "pg_minus_forgotten",
        (PG,),
        "sign|negat|minus|ascent",
        ("pg_loss1 = -mb_advantages", "pg_loss1 = mb_advantages"),
        ("pg_loss2 = -mb_advantages", "pg_loss2 = mb_advantages"),
        listed=False,
    ),
    script(
        "pg_no_minimum",
        (PG,),
        "minimum|only.*clip|without.*min",
        ("pg_loss = torch.max(pg_loss1, pg_loss2).mean()", "pg_loss = pg_loss2.mean()"),
    ),
    script(
        "pg_no_clip",
        (PG,),
        "no.clip|not clipped|unclipped|without.*clip",
        ("pg_loss = torch.max(pg_loss1, pg_loss2).mean()", "pg_loss = pg_loss1.mean()"),
    ),
    script(
        "pg_ratio_inverted",
        (PG,),
        "inver",
        ("logratio = newlogprob - b_logprobs[mb_inds]", "logratio = b_logprobs[mb_inds] - newlogprob"),
    ),
    script(
        "pg_rows",
        (PG, NORM, GRAD),
        "rows|permut|other",
        ("mb_advantages = b_advantages[mb_inds]", "mb_advantages = b_advantages[start : start + minibatch_size]"),
        follows=(NORM, PG, ADV),
    ),
    script(
        "pg_sum",
        (PG,),
        "sum",
        ("pg_loss = torch.max(pg_loss1, pg_loss2).mean()", "pg_loss = torch.max(pg_loss1, pg_loss2).sum()"),
    ),
    script(
        "pg_broadcast",
        (PG,),
        "broadcast|every|all rows",
        ("ratio = logratio.exp()", "ratio = logratio.exp()[:, None]"),
        source=ISSUES.format("RITCHIEHuang/DeepRL_Algorithms", 13),
        listed=False,
    ),
    script(
        "v_advantage", (VF,), "advantage", (SQUARE, "v_loss = 0.5 * ((newvalue - b_advantages[mb_inds]) ** 2).mean()")
    ),
    script(
        "v_old_values",
        (VF,),
        "old.value|at collection",
        (SQUARE, "v_loss = 0.5 * ((newvalue - b_values[mb_inds]) ** 2).mean()"),
    ),
    script(
        "v_double",
        (VF,),
        "half|½|factor|weight|0.5|mean square|twice",
        (SQUARE, "v_loss = 1.0 * ((newvalue - b_returns[mb_inds]) ** 2).mean()"),
    ),
    script(
        "v_sum", (VF,), "sum", (SQUARE, "v_loss = 0.5 * ((newvalue - b_returns[mb_inds]) ** 2).sum()"), listed=False
    ),
    script(
        "v_detached",
        (VF, GRAD),
        "detach|missing|no gradient|without",
        (SQUARE, "v_loss = 0.5 * ((newvalue.detach() - b_returns[mb_inds]) ** 2).mean()"),
    ),
    script(
        "v_broadcast",
        (VF,),
        "broadcast|every|all rows",
        ("            newvalue = newvalue.view(-1)\n", ""),
        source=ISSUES.format("RLinf/RLinf", 1568),
        listed=False,
    ),
    Bug(
        "script-v_clip_no_maximum",
        "script.py",
        (VF,),
        "maximum|max",
        (
            (
                "v_loss = 0.5 * torch.max(v_loss_unclipped, v_loss_clipped).mean()",
                "v_loss = 0.5 * v_loss_clipped.mean()",
            ),
        ),
        ("--clip-vloss",),
    ),
    script(
        "entropy_sign",
        (ENT, GRAD),
        "sign|negat",
        ("pg_loss - args.ent_coef * entropy_loss", "pg_loss + args.ent_coef * entropy_loss"),
        source="https://github.com/PKU-Alignment/omnisafe/pull/133",
    ),
    script(
        "entropy_sample",
        (ENT, GRAD),
        "sample|chosen|log.prob",
        ("entropy_loss = entropy.mean()", "entropy_loss = -newlogprob.mean()"),
    ),
    script(
        "entropy_weight",
        (ENT, GRAD),
        "weight|coefficient|scal",
        ("pg_loss - args.ent_coef * entropy_loss", "pg_loss - 0.2 * entropy_loss"),
    ),
    script("value_weight", (VF, GRAD), "weight|coefficient|scal", ("args.vf_coef * v_loss", "v_loss")),
)

SCRIPT_STEPS = (
    script("not_cleared", (GRAD,), "clear|accumul|sum|previous", ("            optimizer.zero_grad()\n", "")),
    script(
        "cleared_per_epoch",
        (GRAD,),
        "clear|accumul|sum|previous",
        ("            optimizer.zero_grad()\n", ""),
        ("        np.random.shuffle(b_inds)\n", "        np.random.shuffle(b_inds)\n        optimizer.zero_grad()\n"),
        source=ISSUES.format("huggingface/trl", 583),
    ),
    script(
        "gradient_scaled",
        (GRAD,),
        "scale|factor|multipl",
        ("loss.backward()", "(loss / args.num_minibatches).backward()"),
    ),
    script(
        "clipped_by_value",
        (GRAD,),
        "value",
        (
            "nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)",
            "nn.utils.clip_grad_value_(agent.parameters(), args.max_grad_norm / 50)",
        ),
    ),
    script(
        "no_value_loss",
        (GRAD, VF),
        "missing|part|critic|value",
        ("entropy_loss + args.vf_coef * v_loss", "entropy_loss"),
    ),
    script(
        "features_detached",
        (GRAD,),
        "detach|missing|no gradient|without",
        ("logits = 3 * self.actor(x)", "logits = 3 * self.actor[2:](self.actor[:2](x).detach())"),
        listed=False,
    ),
    script(
        "lr_other",
        (OPT, SCHED),
        "rate",
        (
            "optimizer.step()\n",
            'optimizer.param_groups[0]["lr"] *= 3\n            optimizer.step()\n            optimizer.param_groups[0]["lr"] /= 3\n',
        ),
    ),
    script(
        "state_lost",
        (OPT,),
        "state|lost|fresh|restart",
        (
            "    for step in range(args.num_steps):\n",
            "    optimizer = torch.optim.Adam(agent.parameters(), lr=optimizer.param_groups[0]['lr'], eps=1e-5)\n    for step in range(args.num_steps):\n",
        ),
    ),
    script(
        "state_lost_each_epoch",
        (OPT,),
        "state|lost|fresh|restart",
        ("        np.random.shuffle(b_inds)\n", "        np.random.shuffle(b_inds)\n        optimizer.state.clear()\n"),
    ),
    script("decay", (OPT,), "decay", (MAKE_ADAM, DECAYING + "optimizer = Decaying(")),
    script(
        "decay_outside",
        (OPT,),
        "decay|outside",
        (
            "            optimizer.step()\n",
            """            optimizer.step()
            with torch.no_grad():
                for p in agent.parameters():
                    p.mul_(0.999)
""",
        ),
        listed=False,
    ),
    script(
        "missing_parameter",
        (OPT,),
        "left.out|lacks",
        (MAKE_ADAM + "agent.parameters()", MAKE_ADAM + "agent.actor.parameters()"),
    ),
    script("other_optimizer", (OPT,), "gradient.descent|another", (MAKE_ADAM, DESCENT + "optimizer = Descent(")),
    script(
        "same_minibatches",
        (MB,),
        "same",
        ("        np.random.shuffle(b_inds)\n", ""),
        ("b_inds = np.arange(batch_size)", "b_inds = np.random.permutation(batch_size)"),
    ),
    script(
        "with_replacement",
        (MB,),
        "overlap|repeat|replace|twice|more than once",
        (ROWS, "            mb_inds = np.random.randint(0, batch_size, minibatch_size)\n"),
    ),
    script(
        "overlapping",
        (MB,),
        "overlap|repeat|replace|twice|more than once",
        (ROWS, "            mb_inds = b_inds[start : start + 2 * minibatch_size]\n"),
    ),
    script(
        "rows_left_out",
        (MB,),
        "left.out|without some",
        ("range(0, batch_size, minibatch_size)", "range(0, batch_size - minibatch_size, minibatch_size)"),
    ),
    script(
        "first_minibatch_only",
        (MB,),
        "same|left.out|one.minibatch|overlap",
        (ROWS, "            mb_inds = b_inds[:minibatch_size]\n"),
    ),
    script(
        "schedule_ends_early",
        (SCHED,),
        "early|soon|before",
        (FRAC, "frac = max(0.0, 1.0 - 2 * (iteration - 1.0) / num_iterations)"),
    ),
    script(
        "schedule_restarts",
        (SCHED,),
        "restart|again|rises|back",
        (FRAC, "frac = 1.0 - ((iteration - 1.0) % (num_iterations // 2)) / (num_iterations // 2)"),
    ),
    script(
        "schedule_negative",
        (SCHED,),
        "negative|below 0|below zero",
        (FRAC, "frac = 1.0 - 2 * (iteration - 1.0) / num_iterations"),
    ),
)
