"""`Telemetry.watch` against gradients that the test computes itself, with common additions to an optimizer."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from waiting import wait_until

from esper_telemetry import Record, Telemetry
from esper_telemetry.journal.read import read_run
from esper_telemetry.updates import gradient_watcher
from esper_telemetry.updates.gradient_watcher import GradientTap, norms_of

PRE, POST = "grad/global/norm_preclip", "grad/global/norm_postclip"


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor = nn.Linear(3, 2)
        self.critic = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.actor(x), self.critic(x)], -1)


class Loop:
    """A user's loop in which every update is one flush."""

    def __init__(self, telemetry: Telemetry, records: list[Record], make: Callable[..., torch.optim.Optimizer]) -> None:
        self.telemetry, self.records = telemetry, records
        self.agent = Agent()
        self.optimizer = make(self.agent.parameters())
        self.inputs = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(1))

    def loss(self, place: int, model: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        out: Tensor = (self.agent if model is None else model)(self.inputs[place])
        return 10 * out.square().mean()

    def expected(self, *losses: Tensor) -> dict[str, list[Tensor]]:
        """Return the gradients of the summed losses by group."""
        gradients = torch.autograd.grad(sum(losses, torch.zeros(())), list(self.agent.parameters()))
        return {"actor": [*gradients[:2]], "critic": [*gradients[2:]]}

    def step(self, *places: int, clip: float | None = None) -> dict[str, float]:
        """Take a step with the gradient of these batches' losses; return the values of its record."""
        self.optimizer.zero_grad()
        for place in places:
            self.loss(place).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.agent.parameters(), clip)
        self.optimizer.step()
        return dict(self.record().values)

    def record(self) -> Record:
        count = len(self.records) + 1
        self.telemetry.flush(env_step=count)
        wait_until(lambda: len(self.records) >= count, f"{count} records")
        return self.records[count - 1]


def norm_of(gradients: list[Tensor] | dict[str, list[Tensor]]) -> float:
    parts = [part for group in gradients.values() for part in group] if isinstance(gradients, dict) else gradients
    return float(torch.cat([gradient.flatten() for gradient in parts]).norm())


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def adam(*, fused: bool) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=fused)


@contextmanager
def loop(make: Callable[..., torch.optim.Optimizer] = sgd) -> Iterator[Loop]:
    records: list[Record] = []
    with Telemetry([records.append], run_dir=None) as telemetry:
        yield Loop(telemetry, records, make)


def test_a_clipped_step() -> None:
    """Norms by group before and after clipping, the factor between them, and the learning rate, without a line in the loop."""
    with loop() as own:
        own.telemetry.watch(own.agent, own.optimizer, actor=own.agent.actor, critic=["critic"])
        groups = own.expected(own.loss(0))
        values = own.step(0, clip=0.5)

    norm = norm_of(groups)
    assert norm > 1
    assert values[PRE] == pytest.approx(norm, rel=1e-6)
    assert values[POST] == pytest.approx(0.5, rel=1e-5)
    assert values["grad/clip/coef"] == pytest.approx(0.5 / norm, rel=1e-5)
    assert values["grad/clip/freq"] == 1
    for group, gradients in groups.items():
        assert values[f"grad/{group}/norm_preclip"] == pytest.approx(norm_of(gradients), rel=1e-5)
        assert values[f"grad/{group}/norm_postclip"] == pytest.approx(norm_of(gradients) * 0.5 / norm, rel=1e-5)
    assert values["opt/lr"] == 0.01


def test_nothing_is_clipped() -> None:
    with loop() as own:
        own.telemetry.watch(own.agent, own.optimizer)
        values = own.step(0)

    assert values["grad/clip/coef"] == 1
    assert values["grad/clip/freq"] == 0
    assert values[PRE] == values[POST] > 0


def test_a_gradient_that_is_dropped_before_the_step_counts_in_neither_norm() -> None:
    with loop() as own:
        own.telemetry.watch(own.agent, own.optimizer, actor="actor", critic="critic")
        groups = own.expected(own.loss(0))
        own.loss(0).backward()
        own.agent.actor.weight.grad = None
        own.optimizer.step()
        values = own.record().values

    kept = groups["actor"][1:]  # the bias
    assert values["grad/actor/norm_preclip"] == values["grad/actor/norm_postclip"] == pytest.approx(norm_of(kept))
    assert values["grad/critic/norm_preclip"] == pytest.approx(norm_of(groups["critic"]))


def test_two_clip_calls() -> None:
    """Actor and critic are clipped separately, to 0.1 and 0.2: no single limit exists, and each has its own norm after clipping."""
    with loop() as own:
        own.telemetry.watch(own.agent, own.optimizer, actor="actor", critic="critic")
        groups = own.expected(own.loss(0))
        own.loss(0).backward()
        nn.utils.clip_grad_norm_(own.agent.actor.parameters(), 0.1)
        nn.utils.clip_grad_norm_(own.agent.critic.parameters(), 0.2)
        own.optimizer.step()
        values = own.record().values

    assert values["grad/actor/norm_preclip"] == pytest.approx(norm_of(groups["actor"]), rel=1e-5)
    assert values["grad/actor/norm_postclip"] == pytest.approx(0.1, rel=1e-4)
    assert values["grad/critic/norm_postclip"] == pytest.approx(0.2, rel=1e-4)
    assert values[POST] == pytest.approx((0.1**2 + 0.2**2) ** 0.5, rel=1e-4)


def test_accumulated_passes() -> None:
    """Three backward passes, one step: the gradient before clipping belongs to their sum."""
    with loop() as own:
        own.telemetry.watch(own.agent, own.optimizer)
        groups = own.expected(*(own.loss(place) for place in range(3)))
        values = own.step(*range(3), clip=0.5)

    assert values[PRE] == pytest.approx(norm_of(groups), rel=1e-5)
    assert values[POST] == pytest.approx(0.5, rel=1e-5)


@pytest.mark.system
def test_compiled_before_it_is_watched() -> None:
    """Hooks on modules would never fire. Hooks on parameters do, and use the names of the inner module."""
    with loop() as own:
        compiled = torch.compile(own.agent, backend="aot_eager")
        own.loss(0, compiled).backward()
        own.optimizer.zero_grad()
        own.telemetry.watch(compiled, own.optimizer, actor="actor", critic="critic")  # type: ignore[arg-type]  # it is one
        groups = own.expected(own.loss(0))
        own.loss(0, compiled).backward()
        nn.utils.clip_grad_norm_(own.agent.parameters(), 0.5)
        own.optimizer.step()
        values = own.record().values

    assert values["grad/actor/norm_preclip"] == pytest.approx(norm_of(groups["actor"]), rel=1e-5)
    assert values[POST] == pytest.approx(0.5, rel=1e-5)
    assert "grad/layer/actor_weight/norm" in values


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_gradient_scaler(fused: bool, unscaled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Norms are the loss's own, whether the loop, the scaler, or a fused optimizer divides by the scale."""
    with loop(adam(fused=fused)) as own:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        own.telemetry.watch(own.agent, own.optimizer)
        groups = own.expected(own.loss(0))
        scaler.scale(own.loss(0)).backward()
        if unscaled:
            scaler.unscale_(own.optimizer)
            nn.utils.clip_grad_norm_(own.agent.parameters(), 0.5)
        scaler.step(own.optimizer)
        scaler.update()
        values = own.record().values

    whole = norm_of(groups)
    assert values[PRE] == pytest.approx(whole, rel=1e-5)
    assert values[POST] == pytest.approx(0.5 if unscaled else whole, rel=1e-5)
    assert caplog.messages == []


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_passes_over(fused: bool) -> None:
    """Its gradients overflow on purpose: the update is without a step and without gradients, and non-finite values are not counted."""
    with loop(adam(fused=fused)) as own:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        own.telemetry.watch(own.agent, own.optimizer)
        for place, factor in enumerate((float("inf"), 1.0)):
            own.optimizer.zero_grad()
            scaler.scale(own.loss(place) * factor).backward()
            scaler.step(own.optimizer)
            scaler.update()
        expected = norm_of(own.expected(own.loss(1)))
        values = own.record().values

    assert values[PRE] == pytest.approx(expected, rel=2e-2)  # the weights have moved by one step of Adam since
    assert f"{PRE}_nonfinite" not in values or values[f"{PRE}_nonfinite"] == 0


def test_clipping_what_is_still_scaled_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with loop(adam(fused=True)) as own:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        own.telemetry.watch(own.agent, own.optimizer)
        scaler.scale(own.loss(0)).backward()
        nn.utils.clip_grad_norm_(own.agent.parameters(), 0.5)
        scaler.step(own.optimizer)
        values = own.record().values

    assert values[POST] == pytest.approx(0.5 / 1024, rel=1e-4)
    assert [message for message in caplog.messages if "call scaler.unscale_(optimizer) before it" in message]


def test_two_optimizers_are_one_network() -> None:
    """Each optimizer changes one half; the norm of the whole network covers both."""
    with loop() as own:
        first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (own.agent.actor, own.agent.critic))
        own.telemetry.watch(own.agent, first, actor=own.agent.actor)
        own.telemetry.watch(own.agent, second, critic=own.agent.critic)
        groups = own.expected(own.loss(0))
        own.loss(0).backward()
        first.step()
        second.step()
        values = own.record().values

    assert values[PRE] == pytest.approx(norm_of(groups), rel=1e-5)
    assert values["grad/critic/norm_preclip"] == pytest.approx(norm_of(groups["critic"]), rel=1e-5)


def test_learning_rates_of_actor_and_critic() -> None:
    """Two optimizers, then one with two groups. A scheduler halves the critic's rate. `opt/lr` is the first one's."""
    with loop() as own:
        actor, critic = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (own.agent.actor, own.agent.critic))
        stops = [own.telemetry.watch(own.agent, actor, actor="actor"), own.telemetry.watch(own.agent, critic, critic="critic")]
        schedule = torch.optim.lr_scheduler.ExponentialLR(critic, 0.5)
        records = []
        for _ in range(2):
            own.loss(0).backward()
            actor.step()
            critic.step()
            records.append(own.record().values)
            schedule.step()
        for stop in stops:
            stop()
        groups = [{"params": part.parameters(), "lr": rate} for part, rate in ((own.agent.critic, 0.3), (own.agent.actor, 0.4))]
        both = torch.optim.SGD(groups)
        own.telemetry.watch(own.agent, both)
        own.loss(0).backward()
        both.step()
        records.append(own.record().values)

    rates = [{key: value for key, value in values.items() if key.startswith("opt/lr")} for values in records]
    assert rates == [
        {"opt/lr": 0.1},
        {"opt/lr": 0.1, "opt/lr/actor": 0.1, "opt/lr/critic": 0.05},
        {"opt/lr": 0.3, "opt/lr/critic": 0.3, "opt/lr/actor": 0.4},
    ]


def test_a_backward_pass_stops_at_the_first_gradient_that_is_not_finite() -> None:
    """The actor's loss is NaN, so the pass stops in the actor. It does not without the option or after the watch has ended."""
    with loop() as own:

        def backward() -> None:
            own.optimizer.zero_grad()
            (own.agent.critic(own.inputs[0]).sum() + own.agent.actor(own.inputs[0]).sum() * torch.nan).backward()

        own.telemetry.watch(own.agent, own.optimizer)
        backward()
        watched = own.telemetry.watch(own.agent, own.optimizer, stop_on_nonfinite=True)
        with pytest.raises(FloatingPointError) as raised:
            backward()
        torch.autograd.grad(own.loss(0) * torch.nan, list(own.agent.parameters()))  # does not accumulate gradients
        copied = copy.deepcopy(own.agent)
        torch.save(own.agent, io.BytesIO())
        watched()
        backward()

    assert str(raised.value).startswith("the gradient of actor.")
    assert "is not finite" in str(raised.value)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in copied.parameters())


def test_a_sparse_gradient_that_is_not_finite() -> None:
    """A sparse gradient has two rows of two entries each."""
    table = nn.Embedding(4, 2, sparse=True)
    with loop() as own:
        own.agent.add_module("table", table)
        own.telemetry.watch(own.agent, sgd(own.agent.parameters()), stop_on_nonfinite=True)
        table(torch.tensor([1, 1, 3])).sum().backward()
        with pytest.raises(FloatingPointError, match=r"gradient of table\.weight is the first .* \(4 of 8 entries\)"):
            (table(torch.tensor([1, 1, 3])).sum() * torch.tensor(torch.inf)).backward()
        with pytest.raises(ValueError, match="stop_on_nonfinite must be True or False, got 'no'"):
            own.telemetry.watch(own.agent, own.optimizer, stop_on_nonfinite="no")  # type: ignore[arg-type]  # on purpose


def test_gradients_that_cannot_be_measured_cost_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Set by hand, grown after backward, or no step: one warning each, and no wrong number."""
    with loop() as own:
        own.telemetry.watch(own.agent, own.optimizer)
        for parameter in own.agent.parameters():
            parameter.grad = torch.ones_like(parameter)
        own.optimizer.step()
        by_hand = own.record().values
        own.optimizer.zero_grad()
        own.loss(0).backward()
        for parameter in own.agent.parameters():
            parameter.grad = 3 * torch.as_tensor(parameter.grad)
        own.optimizer.step()
        own.record()
        own.record()
        own.record()

    assert PRE not in by_hand
    assert [message.removeprefix("esper-telemetry: ").partition(":")[0][:40] for message in caplog.messages] == [
        "the optimizer took a step without a backward pass"[:40],
        "the gradients at the optimizer's step were larger"[:40],
        "no step of the watched optimizer was seen in this update"[:40],
    ]


def test_gradients_that_are_asked_for_between_clipping_and_the_step() -> None:
    """`torch.autograd.grad` is not a backward pass: its result is not accumulated."""
    with loop() as own:
        own.telemetry.watch(own.agent, own.optimizer)
        own.loss(0).backward()
        norm = float(nn.utils.clip_grad_norm_(own.agent.parameters(), 0.5))
        own.expected(own.loss(1))
        own.optimizer.step()
        values = own.record().values

    assert values[PRE] == pytest.approx(norm, rel=1e-6)
    assert values[POST] == pytest.approx(0.5, rel=1e-5)


def test_parameters_of_several_types() -> None:
    """The critic has half precision, and one weight is complex: all count."""
    with loop() as own:
        own.agent.critic.to(torch.bfloat16)
        wave = nn.Parameter(torch.tensor([3.0 + 4.0j]))
        own.agent.register_parameter("wave", wave)
        optimizer = torch.optim.SGD(own.agent.parameters(), lr=0.1)
        own.telemetry.watch(own.agent, optimizer, critic="critic")
        x = own.inputs[0]
        (own.agent.actor(x).sum() + own.agent.critic(x.bfloat16()).float().sum() + (wave * wave.conj()).real.sum()).backward()
        whole = sum(float(torch.as_tensor(p.grad).abs().double().square().sum()) for p in own.agent.parameters())
        optimizer.step()
        values = own.record().values

    assert values[PRE] == pytest.approx(whole**0.5, rel=1e-5)
    assert values["grad/layer/wave/norm"] == pytest.approx(10.0)


def test_weights_are_the_same_bit_for_bit() -> None:
    def trained(watched: bool) -> list[Tensor]:
        with loop(adam(fused=False)) as own:
            if watched:
                own.telemetry.watch(own.agent, own.optimizer, actor="actor", critic="critic")
            for place in range(4):
                own.step(place, clip=0.5)
            return list(own.agent.parameters())

    assert all(torch.equal(with_, without) for with_, without in zip(trained(True), trained(False), strict=True))


def test_what_is_watched_can_be_saved_copied_and_let_go() -> None:
    with loop() as own:
        stop = own.telemetry.watch(own.agent, own.optimizer)
        torch.save(own.agent, io.BytesIO())
        torch.save(own.optimizer.state_dict(), io.BytesIO())
        copy.deepcopy(own.agent)
        stop()

        assert PRE not in own.step(0)


def test_what_cannot_be_watched() -> None:
    with loop() as own:
        with pytest.raises(ValueError, match=r"'actr' is not part of the model, which has actor\.weight"):
            own.telemetry.watch(own.agent, own.optimizer, actor="actr")
        with pytest.raises(ValueError, match="a Linear is not part of the model"):
            own.telemetry.watch(own.agent, own.optimizer, critic=nn.Linear(1, 1))
        with pytest.raises(ValueError, match="the optimizer changes no parameter of the model"):
            own.telemetry.watch(nn.Linear(1, 1), own.optimizer)


def test_actor_and_critic_in_models_of_their_own_keep_their_names_apart(tmp_path: Path) -> None:
    """Both models call their parameters weight and bias."""
    actor, critic = nn.Linear(4, 2), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(actor.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.05)]
    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        telemetry.watch(actor, optimizers[0], actor=actor)
        telemetry.watch(critic, optimizers[1], critic=critic)
        (actor(torch.ones(4)).sum() + 3 * critic(torch.ones(4)).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
        telemetry.flush(env_step=1)

    values = read_run(tmp_path / "run").records[0].values
    rates = {key: value for key, value in values.items() if key.startswith("opt/lr")}
    assert rates == pytest.approx({"opt/lr": 0.1, "opt/lr/actor": 0.1, "opt/lr/critic": 0.05})
    assert values["grad/critic/norm_preclip"] == pytest.approx(3 * 5**0.5)
    assert values["grad/actor/norm_preclip"] == pytest.approx(10**0.5)


def halve_one(parameters: list[nn.Parameter]) -> None:
    assert parameters[3].grad is not None
    parameters[3].grad.mul_(0.5)


def replace_one(parameters: list[nn.Parameter]) -> None:
    assert parameters[3].grad is not None
    parameters[3].grad = parameters[3].grad * 0.25


CHANGES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "one factor": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e-3),
    "nothing": lambda parameters: None,
    "by value": lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-4),
    "one of them": halve_one,
    "one is set": replace_one,
}


@pytest.mark.parametrize("change", CHANGES)
def test_many_tensors_are_read_twice_only_where_one_factor_does_not_explain_their_clipping(change: str) -> None:
    """96 tensors; the norms at every step are those of the gradients, whether they were read or follow from a sample."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(48) for layer in (nn.Linear(4, 4), nn.Identity())])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    parameters = list(model.parameters())
    tap, expected = GradientTap(model, optimizer, nullcontext()), []
    with mock.patch.object(gradient_watcher, "norms_of", side_effect=norms_of) as readings:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            CHANGES[change](parameters)
            expected.append(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]))
            optimizer.step()
    steps = tap.take(whole=True)
    tap.remove()

    for step, norms in zip(steps, expected, strict=True):
        torch.testing.assert_close(step.after, norms, rtol=1e-5, atol=0.0)
    whole_readings = {"one factor": 4, "nothing": 4}.get(change, 6)  # of 96, in three steps: before each, and after the first
    assert sum(len(call.args[0]) == 96 for call in readings.call_args_list) == whole_readings
