"""What is reported of gradient norms: of the whole network, of declared groups, of heads and of every tensor (G1, G2, G4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.group import Mean, Metric, MetricGroup, Sum, label, reports
from esper_telemetry.record import Level

NO_GRADIENT = "no parameter has a gradient, or none is finite"


@dataclass(frozen=True, slots=True)
class GlobalGradient(MetricGroup):
    """The gradient of all parameters, one value per optimizer step."""

    replicated: ClassVar[bool] = True
    norm_preclip: Mean | None = reports(
        Metric(
            key="grad/global/norm_preclip",
            number=500,
            unit="gradient norm",
            question="How large is the gradient of the whole network, before clipping?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="near its own history",
            warn="robust z of its log10 > 4",
            critical="robust z of its log10 > 8",
            source="AutoClip 2007.14469; measured null rates",
            undefined=NO_GRADIENT,
        ),
        Metric(
            key="grad/global/norm_preclip_max",
            number=501,
            unit="gradient norm",
            question="How large was the gradient of the whole network at its worst step?",
            over="max",
            low=0.0,
            level=Level.MINIMAL,
            undefined=NO_GRADIENT,
        ),
    )
    rms: Mean | None = reports(
        Metric(
            key="grad/global/rms",
            number=502,
            unit="gradient norm/√parameters",
            question="How large is a typical entry of the gradient? Comparable between networks of any size.",
            low=0.0,
            undefined=NO_GRADIENT,
        )
    )
    norm_postclip: Mean | None = reports(
        Metric(
            key="grad/global/norm_postclip",
            number=503,
            unit="gradient norm",
            question="How large is the gradient that the optimizer gets?",
            low=0.0,
            healthy="at most the limit",
            undefined="nothing is clipped, or a gradient is not finite",
        )
    )
    nonfinite: Sum | None = reports(
        Metric(
            key="grad/global/norm_preclip_nonfinite",
            number=504,
            unit="count",
            question="How many entries of the gradients, or whole tensors where only norms are known, were not finite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="0",
            critical="> 0",
            when_positive=True,
        )
    )


@dataclass(frozen=True, slots=True)
class GroupGradients(MetricGroup):
    """The gradients of the declared groups that have one."""

    replicated: ClassVar[bool] = True
    group: tuple[str, ...] = label()
    norm_preclip: Mean | None = reports(
        Metric(
            key="grad/{group}/norm_preclip",
            number=505,
            unit="gradient norm",
            question="How large is the gradient of this part of the network, before clipping?",
            low=0.0,
            healthy="near its own history",
            warn="robust z of its log10 > 4",
            critical="robust z of its log10 > 8",
            source="AutoClip 2007.14469; measured null rates",
            undefined="no parameter of the group has a gradient, or none is finite",
        ),
        Metric(
            key="grad/{group}/norm_preclip_max",
            number=506,
            unit="gradient norm",
            question="How large was the gradient of this part of the network at its worst step?",
            over="max",
            low=0.0,
            undefined="no parameter of the group has a gradient, or none is finite",
        ),
    )
    rms: Mean | None = reports(
        Metric(
            key="grad/{group}/rms",
            number=507,
            unit="gradient norm/√parameters",
            question="How large is a typical entry of this group's gradient? Comparable between groups of any size.",
            low=0.0,
            undefined="no parameter of the group has a gradient, or none is finite",
        )
    )
    norm_postclip: Mean | None = reports(
        Metric(
            key="grad/{group}/norm_postclip",
            number=508,
            unit="gradient norm",
            question="How large is the gradient that the optimizer gets for this part of the network?",
            low=0.0,
            undefined="nothing is clipped, or a gradient is not finite",
        )
    )
    nonfinite: Sum | None = reports(
        Metric(
            key="grad/{group}/norm_preclip_nonfinite",
            number=509,
            unit="count",
            question="In which part of the network are gradients NaN or infinite?",
            low=0.0,
            healthy="0",
            critical="> 0",
            when_positive=True,
        )
    )


@dataclass(frozen=True, slots=True)
class LayerGradients(MetricGroup):
    """The gradient of every parameter tensor that has one."""

    replicated: ClassVar[bool] = True
    layer: tuple[str, ...] = label()
    norm: Mean | None = reports(
        Metric(
            key="grad/layer/{layer}/norm",
            number=520,
            unit="gradient norm",
            question="How large is the gradient of this parameter tensor, before clipping?",
            low=0.0,
            undefined="the tensor has no gradient, or none of its steps is finite",
        )
    )


@dataclass(frozen=True, slots=True)
class HeadGradients(MetricGroup):
    """The gradients of the policy's heads that have one."""

    replicated: ClassVar[bool] = True
    head: tuple[str, ...] = label()
    norm: Mean | None = reports(
        Metric(
            key="grad/head/{head}/norm",
            number=521,
            unit="gradient norm",
            question="Which head of the policy learns? Heads that seldom matter have small gradients by nature.",
            low=0.0,
            healthy="near its own history",
            critical="exactly 0 while the head decides in 5 % of the rows",
            source="heuristic",
            undefined="the head has no gradient",
        )
    )


@dataclass(frozen=True, slots=True)
class TermGradients(MetricGroup):
    """The gradient of the value head."""

    replicated: ClassVar[bool] = True
    value: Mean | None = reports(
        Metric(
            key="grad/value/norm",
            number=522,
            unit="gradient norm",
            question="How large is the gradient of the value head?",
            low=0.0,
            healthy="near its own history",
            undefined="the value head has no gradient",
        )
    )
